// A stand-in for NVIDIA's libnvidia-ml.so.1: the real pynvml runs on it, without a GPU and without a driver.
//
// What the devices are like stands in a text file, $FAKE_NVML_STATE, of lines "key=value". It is read anew at each call,
// so a test changes a device while it is watched, and setters write to it, so that what a process has set outlives the
// process, as with a real driver. Of equal keys the last counts.
//
//   count=2  driver=570.86.10                 devices, version; fields and events follow the version
//   root=0                                    setters answer NO_PERMISSION
//   init_ret=9                                nvmlInit fails
//   trace=1                                   every call on a device is logged
//   gpu.0.KEY=VALUE, gpu.*.KEY=VALUE          of one device, or of all that have no line of their own:
//     lost=1                                    every call answers GPU_IS_LOST
//     ret.FUNCTION=CODE   hang.FUNCTION=MS      one call fails, or takes its time
//     field.ID=N   field.ID.SCOPE=N             nvmlDeviceGetFieldValues; below 0 for one that is not supported
//     others                                    see where they are read
// $FAKE_NVML_STATE.events   append "GPU TYPE DATA\n": goes to each event set that was registered before
// $FAKE_NVML_STATE.log      "PID FUNCTION GPU A B RET" for each call of a setter (with trace=1 of every function)
//
// Plain nvmlInit is missing on purpose: a CUDA build of torch looks for it, and would count these devices.
// Compiled with -DFAKE_NVML_ABI_CHECK, the compiler checks every signature against NVIDIA's own header.
// Compiled with -DFAKE_NVML_OLD, functions that came with driver 535 and later are missing, as in an old library.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef FAKE_NVML_ABI_CHECK
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>
typedef nvmlReturn_t Ret;
typedef nvmlDevice_t Device;
typedef nvmlEventSet_t EventSet;
typedef nvmlEventData_t EventData;
typedef nvmlFieldValue_t FieldValue;
typedef nvmlTemperature_t TemperatureV;
typedef nvmlMarginTemperature_t Margin;
#define ENUM(T) T
#else
typedef int Ret;
typedef struct nvmlDevice_st *Device;
typedef struct nvmlEventSet_st *EventSet;
typedef struct {
  Device device;
  unsigned long long eventType, eventData;
  unsigned gpuInstanceId, computeInstanceId;
} EventData;
typedef struct {
  unsigned fieldId, scopeId;
  long long timestamp, latencyUsec;
  int valueType, nvmlReturn;
  union {
    double dVal;
    unsigned uiVal;
    unsigned long long ullVal;
  } value;
} FieldValue;
typedef struct {
  unsigned version;
  int sensorType, temperature;
} TemperatureV;
typedef struct {
  unsigned version;
  int marginTemperature;
} Margin;
#define ENUM(T) int
#endif

_Static_assert(sizeof(EventData) == 32 && sizeof(FieldValue) == 40, "as in NVIDIA's header");
_Static_assert(sizeof(TemperatureV) == 12 && sizeof(Margin) == 8, "as in NVIDIA's header");

enum { OK, UNINITIALIZED, INVALID, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, TIMEOUT = 10, LOST = 15 };
enum { UINT = 1, ULL = 3 };  // value types
enum { DEVICES = 64, STATE_BYTES = 1 << 16, POLL_MS = 4 };
#define API __attribute__((visibility("default")))

struct nvmlDevice_st {
  int index;
};
struct nvmlEventSet_st {
  unsigned long long mask[DEVICES];
  long from[DEVICES], at;
};
static struct nvmlDevice_st devices[DEVICES];
static int holders;
static __thread char state[STATE_BYTES];  // as this thread's current call sees it

// --- the state file ---

static const char *path(const char *suffix) {
  static __thread char name[4096];
  const char *base = getenv("FAKE_NVML_STATE");
  snprintf(name, sizeof name, "%s%s", base ? base : "/nonexistent", suffix);
  return name;
}

static void load(void) {
  int file = open(path(""), O_RDONLY);
  ssize_t n = file < 0 ? 0 : read(file, state + 1, sizeof state - 2);
  if (file >= 0) close(file);
  state[0] = '\n';
  state[n < 0 ? 1 : n + 1] = 0;
}

static int find(char *out, size_t size, const char *format, ...) {
  char key[256] = "\n", *hit = NULL;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(key + 1, sizeof key - 2, format, arguments);
  va_end(arguments);
  strcat(key, "=");
  for (char *p = state; (p = strstr(p, key)); p++) hit = p + strlen(key);
  if (hit) snprintf(out, size, "%.*s", (int)strcspn(hit, "\n"), hit);
  return hit != NULL;
}

static int get(int gpu, const char *key, char *out, size_t size) {
  if (gpu < 0) return find(out, size, "%s", key);
  return find(out, size, "gpu.%d.%s", gpu, key) || find(out, size, "gpu.*.%s", key);
}

static long long number(int gpu, const char *key, long long otherwise) {
  char text[128];
  return get(gpu, key, text, sizeof text) ? strtoll(text, NULL, 0) : otherwise;
}

static void put(int gpu, const char *key, long long value) {  // under a lock that the tests take, too
  char temporary[4200];
  int lock = open(path(".lock"), O_CREAT | O_RDWR, 0666);
  flock(lock, LOCK_EX);
  load();
  snprintf(temporary, sizeof temporary, "%s.%d", path(""), getpid());
  FILE *file = fopen(temporary, "w");
  if (file) {
    fprintf(file, "%s\ngpu.%d.%s=%lld\n", state + 1, gpu, key, value);
    fclose(file);
    rename(temporary, path(""));
  }
  close(lock);
}

static Ret note(const char *function, int gpu, unsigned a, unsigned b, Ret ret) {
  FILE *file = fopen(path(".log"), "a");
  if (file) fprintf(file, "%d %s %d %u %u %d\n", getpid(), function, gpu, a, b, (int)ret), fclose(file);
  return ret;
}

// --- what every call checks first ---

static int count(void) { return (int)number(-1, "count", 2); }
static int has_570(void) { return number(-1, "driver", 570) >= 570; }  // strtoll ends at the dot

static void hang(int gpu, const char *function) {
  char key[160];
  snprintf(key, sizeof key, "hang.%s", function);
  long long ms = number(gpu, key, 0);
  if (ms) usleep(ms * 1000);
}

static Ret enter(Device device, const char *function) {
  char key[160];
  if (!holders) return UNINITIALIZED;
  load();
  if (device < devices || device >= devices + count()) return INVALID;
  if (number(-1, "trace", 0)) note(function, device->index, 0, 0, OK);
  hang(device->index, function);
  load();
  if (number(device->index, "lost", 0)) return LOST;
  snprintf(key, sizeof key, "ret.%s", function);
  return number(device->index, key, OK);
}

static Ret enter_setter(Device device, const char *function) {
  Ret ret = enter(device, function);
  return ret ? ret : number(-1, "root", geteuid() == 0) ? OK : NO_PERMISSION;
}

#define ENTER(device)                      \
  do {                                     \
    Ret ret_ = enter(device, __func__);    \
    if (ret_) return ret_;                 \
  } while (0)
#define GETTER(function, T, key, otherwise)         \
  API Ret function(Device device, T *out) {         \
    ENTER(device);                                  \
    *out = number(device->index, key, otherwise);   \
    return OK;                                      \
  }

// --- library and devices ---

API Ret nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  load();
  hang(-1, "nvmlInit");
  Ret ret = number(-1, "init_ret", OK);
  for (int i = 0; i < DEVICES; i++) devices[i].index = i;
  if (!ret) __atomic_add_fetch(&holders, 1, __ATOMIC_SEQ_CST);
  return ret;
}
API Ret nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API Ret nvmlShutdown(void) {
  if (!holders) return UNINITIALIZED;
  __atomic_sub_fetch(&holders, 1, __ATOMIC_SEQ_CST);
  return OK;
}
API const char *nvmlErrorString(Ret ret) {
  static __thread char text[32];
  snprintf(text, sizeof text, "fake error %d", (int)ret);
  return text;
}
API Ret nvmlSystemGetDriverVersion(char *out, unsigned size) {
  char version[80] = "570.86.10";
  load();
  get(-1, "driver", version, sizeof version);
  snprintf(out, size, "%s", version);
  return holders ? OK : UNINITIALIZED;
}
API Ret nvmlDeviceGetCount_v2(unsigned *out) {
  load();
  *out = count();
  return holders ? OK : UNINITIALIZED;
}
API Ret nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *out) {
  load();
  if (!holders) return UNINITIALIZED;
  if ((int)index >= count()) return INVALID;
  *out = &devices[index];
  return number(index, "lost", 0) ? LOST : OK;
}
static void uuid_of(int index, char *out, unsigned size) {
  if (!get(index, "uuid", out, size)) snprintf(out, size, "GPU-fa4e0000-0000-0000-0000-%012d", index);
}
API Ret nvmlDeviceGetHandleByUUID(const char *uuid, Device *out) {
  char other[96];
  if (!holders) return UNINITIALIZED;
  load();
  for (int i = 0; i < count(); i++) {
    uuid_of(i, other, sizeof other);
    if (!strcmp(other, uuid)) return nvmlDeviceGetHandleByIndex_v2(i, out);
  }
  return NOT_FOUND;
}
API Ret nvmlDeviceGetUUID(Device device, char *out, unsigned size) {
  ENTER(device);
  uuid_of(device->index, out, size);
  return OK;
}
API Ret nvmlDeviceGetName(Device device, char *out, unsigned size) {
  ENTER(device);
  if (!get(device->index, "name", out, size)) snprintf(out, size, "Fake GPU");
  return OK;
}

// --- health ---

GETTER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "clock_reasons", 0)
#ifndef FAKE_NVML_OLD
GETTER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "clock_reasons", 0)
API Ret nvmlDeviceGetTemperatureV(Device device, TemperatureV *out) {
  ENTER(device);
  out->temperature = number(device->index, "celsius", 45);
  return OK;
}
API Ret nvmlDeviceGetMarginTemperature(Device device, Margin *out) {
  ENTER(device);
  if (!has_570()) return NOT_SUPPORTED;
  out->marginTemperature = number(device->index, "margin_c", 40);
  return OK;
}
#endif
API Ret nvmlDeviceGetTemperature(Device device, ENUM(nvmlTemperatureSensors_t) sensor, unsigned *out) {
  (void)sensor;
  ENTER(device);
  *out = number(device->index, "celsius", 45);
  return OK;
}
API Ret nvmlDeviceGetNvLinkState(Device device, unsigned link, ENUM(nvmlEnableState_t) * out) {
  char key[40];
  ENTER(device);
  if (link >= number(device->index, "nvlinks", 18)) return INVALID;
  snprintf(key, sizeof key, "nvlink.%u", link);
  *out = number(device->index, key, 1);
  return OK;
}

static long long field(int gpu, unsigned id, unsigned scope, int *type) {  // below 0: there is none
  static const struct {
    unsigned id;
    const char *key;
    int type;
  } known[] = {{4, "double_bit_ecc", ULL}, {144, "remap_pending", UINT}, {145, "remap_failed", UINT}, {230, "recovery_action", UINT}};
  char key[64], text[32];
  *type = UINT;
  snprintf(key, sizeof key, "field.%u.%u", id, scope);
  if (get(gpu, key, text, sizeof text)) return strtoll(text, NULL, 0);
  snprintf(key, sizeof key, "field.%u", id);
  if (get(gpu, key, text, sizeof text)) return strtoll(text, NULL, 0);
  if ((id == 230 || id == 165) && !has_570()) return -1;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].id == id) return *type = known[i].type, number(gpu, known[i].key, 0);
  snprintf(key, sizeof key, "nvlink.%u", scope);
  return id == 165 && scope < number(gpu, "nvlinks", 18) ? number(gpu, key, 1) : -1;
}
API Ret nvmlDeviceGetFieldValues(Device device, int n, FieldValue *values) {
  ENTER(device);
  for (int i = 0; i < n; i++) {
    int type;
    long long value = field(device->index, values[i].fieldId, values[i].scopeId, &type);
    values[i].nvmlReturn = value < 0 ? NOT_SUPPORTED : OK;
    values[i].valueType = type;
    values[i].value.ullVal = 0xdeadbeefdeadbeefull;  // only the member that the type names is filled in
    if (type == UINT) values[i].value.uiVal = value;
    if (type == ULL) values[i].value.ullVal = value;
  }
  return OK;
}

// --- events ---

static unsigned long long event_types(int gpu) { return number(gpu, "event_types", has_570() ? 0xfe1f : 0x9f); }

API Ret nvmlDeviceGetSupportedEventTypes(Device device, unsigned long long *out) {
  ENTER(device);
  *out = event_types(device->index);
  return OK;
}
API Ret nvmlEventSetCreate(EventSet *out) {
  *out = calloc(1, sizeof **out);
  return holders ? OK : UNINITIALIZED;
}
API Ret nvmlEventSetFree(EventSet set) {
  free(set);
  return OK;
}
API Ret nvmlDeviceRegisterEvents(Device device, unsigned long long types, EventSet set) {
  struct stat events;
  ENTER(device);
  if (types & ~event_types(device->index)) return NOT_SUPPORTED;
  set->mask[device->index] |= types;
  set->from[device->index] = stat(path(".events"), &events) ? 0 : events.st_size;  // what came before is lost
  return OK;
}
static int next_event(EventSet set, EventData *out) {
  char line[128];
  FILE *file = fopen(path(".events"), "r");
  if (!file) return 0;
  fseek(file, set->at, SEEK_SET);
  int hit = 0;
  while (!hit && fgets(line, sizeof line, file) && strchr(line, '\n')) {
    unsigned gpu;
    long long type = 0, data = 0;
    long here = set->at;
    set->at += strlen(line);
    if (sscanf(line, "%u %lli %lli", &gpu, &type, &data) < 2 || gpu >= DEVICES) continue;
    if (!(set->mask[gpu] & type) || here < set->from[gpu]) continue;
    *out = (EventData){.device = &devices[gpu], .eventType = type, .eventData = data, .gpuInstanceId = ~0u, .computeInstanceId = ~0u};
    hit = 1;
  }
  fclose(file);
  return hit;
}
API Ret nvmlEventSetWait_v2(EventSet set, EventData *out, unsigned ms) {
  for (long left = ms; holders; left -= POLL_MS) {
    load();
    for (int i = 0; i < count(); i++)
      if (set->mask[i]) hang(i, "nvmlEventSetWait");
    if (next_event(set, out)) return OK;
    for (int i = 0; i < count(); i++)  // as a real driver does: at once, and for the whole set
      if (set->mask[i] && number(i, "lost", 0)) return LOST;
    if (left <= 0) return TIMEOUT;
    usleep(POLL_MS * 1000);
  }
  return UNINITIALIZED;
}

// --- power ---

static unsigned default_limit(int gpu) { return number(gpu, "power_default", 700000); }
static unsigned requested_limit(int gpu) { return number(gpu, "power_limit", default_limit(gpu)); }

GETTER(nvmlDeviceGetPowerManagementLimit, unsigned, "power_limit", default_limit(device->index))
GETTER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, "power_default", 700000)
GETTER(nvmlDeviceGetPowerUsage, unsigned, "power_usage", 350000)
API Ret nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned *out) {
  ENTER(device);
  unsigned requested = requested_limit(device->index);
  unsigned outside = number(device->index, "power_outside", requested);  // the board controller's
  *out = outside < requested ? outside : requested;
  return OK;
}
API Ret nvmlDeviceGetPowerManagementLimitConstraints(Device device, unsigned *lowest, unsigned *highest) {
  ENTER(device);
  *lowest = number(device->index, "power_min", 200000);
  *highest = number(device->index, "power_max", 700000);
  return OK;
}
API Ret nvmlDeviceSetPowerManagementLimit(Device device, unsigned mw) {
  Ret ret = enter_setter(device, __func__);
  if (!ret && (mw < number(device->index, "power_min", 200000) || mw > number(device->index, "power_max", 700000))) ret = INVALID;
  if (!ret) put(device->index, "power_limit", mw);
  return note(__func__, device->index, mw, 0, ret);
}
