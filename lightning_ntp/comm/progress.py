"""Where this member is, for whoever looks for the culprit of a hang. Written on the step path, without any I/O."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """What a member says about its own progress. The main thread and the sync's thread write; others only read.

    Attributes:
        generation: Of the view in which it works; -1 before the first.
        step: The optimizer step that it works on.
        phase: What it does, such as ``"forward"`` or ``"data"``; phases of a step have the shorter time limit.
        waiting: For each channel that it has entered and not left, the collective's number on that channel.
        left: Collectives that it has left.
        failed_in: The channel of a collective that raised, until it is told to :meth:`reset`.
    """

    generation: int = -1
    step: int = 0
    phase: str = "start"
    waiting: dict[str, int] = field(default_factory=dict)
    left: int = 0
    failed_in: str | None = None

    def enter(self, channel: str, number: int) -> None:
        self.waiting[channel] = number

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
        self.generation, self.failed_in, self.phase = generation, None, "change"
