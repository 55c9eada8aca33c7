"""A verifiers environment that rewards short replies."""

from collections.abc import Iterable

import verifiers.v1 as vf

TOPICS = ("the last item of a list", "a file", "the doubles of some numbers", "a date", "a queue")


class ShortReplyTask(vf.Task[vf.TaskData]):
    """A prompt whose reply should be short."""

    @vf.reward(weight=1.0)
    async def shortness(self, trace: vf.Trace) -> float:
        """From 0 to 1: the shorter the reply, the higher."""
        return 1 / (1 + len(trace.last_reply) / 50)


class ShortReplyTaskset(vf.Taskset[ShortReplyTask, vf.TasksetConfig]):
    """One task for each topic."""

    def load(self) -> Iterable[ShortReplyTask]:
        """Builds the tasks."""
        for topic in TOPICS:
            data = vf.TaskData(prompt=f"{topic} in lib.py should be right.")
            yield ShortReplyTask(data, self.config.task)


__all__ = ["ShortReplyTaskset"]
