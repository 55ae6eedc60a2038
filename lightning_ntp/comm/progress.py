"""Where this member is, for whoever looks for the culprit of a hang. Written on the step path, without any I/O."""

from __future__ import annotations

from collections.abc import Callable


class Progress:
    """What a member says about its own progress. The main thread and the sync's thread write; others only read.

    Args:
        generation: Of the view in which it works; -1 before the first.
        step: The optimizer step that it works on.
        phase: What it does, such as ``"forward"`` or ``"loading"``; phases of a step have the shorter time limit.
        waiting: For each channel that it has entered and not left, the collective's number on that channel.
        left: Collectives that it has left.
        failed_in: The channel of a collective that raised, until it is told to :meth:`reset`.

    Attributes:
        on_moment: Called with the step and a moment: a phase that begins, or a channel that is entered. For planned
            faults.
    """

    def __init__(
        self,
        generation: int = -1,
        step: int = 0,
        phase: str = "start",
        waiting: dict[str, int] | None = None,
        left: int = 0,
        failed_in: str | None = None,
    ) -> None:
        self.generation, self.step, self.left = generation, step, left
        self.waiting = {} if waiting is None else waiting
        self.failed_in = failed_in
        self.on_moment: Callable[[int, str], None] | None = None
        self._phase = phase

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        if self.on_moment is not None:
            self.on_moment(self.step, phase)

    def enter(self, channel: str, number: int) -> None:
        self.waiting[channel] = number
        if self.on_moment is not None:
            self.on_moment(self.step, channel)

    def leave(self, channel: str) -> None:
        self.waiting.pop(channel, None)
        self.left += 1

    def fail(self, channel: str) -> None:
        """A collective on ``channel`` raised: it has been left, but not as it should."""
        self.waiting.pop(channel, None)
        self.failed_in = channel

    def reset(self, generation: int) -> None:
        """Begin in a new generation, in the phase "change"."""
        self.waiting.clear()
        self.generation, self.failed_in, self._phase = generation, None, "change"
