"""How the gradients of unequal replicas meet."""

from lightning_ntp.sync.bucket import Bucket, SyncChannels
from lightning_ntp.sync.gradient import GradientSync, reduce_dtype_of

__all__ = ["Bucket", "GradientSync", "SyncChannels", "reduce_dtype_of"]
