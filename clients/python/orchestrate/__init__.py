"""External agents and environments: take episodes from a run of `orchestrate`, and return rewards.

```python
import orchestrate

@orchestrate.environment(timeout=60)
def sums(episode: orchestrate.Episode) -> float:
    reply = episode.chat([{"role": "user", "content": episode.task.prompt}])
    return float(reply.content.strip() == episode.task.row["answer"])

if __name__ == "__main__":
    sums.main()
```
"""

from .aio import AsyncEpisode, AsyncGateway
from .client import Connection, Episode, Gateway
from .container import SandboxLimits
from .docker import SandboxFailure
from .environment import Environment, environment
from .sandbox import CommandResult, Sandbox
from .version import __version__
from .wire import (
    AgentFailure,
    EnvironmentFailure,
    EpisodeEnded,
    LeaseOver,
    MalformedCall,
    OrchestrateError,
    Refused,
    Reply,
    RunOver,
    Taken,
    Task,
    ToolCall,
    Unreachable,
)
from .workers import main, work

__all__ = [
    "AgentFailure",
    "AsyncEpisode",
    "AsyncGateway",
    "CommandResult",
    "Connection",
    "Environment",
    "EnvironmentFailure",
    "Episode",
    "EpisodeEnded",
    "Gateway",
    "LeaseOver",
    "MalformedCall",
    "OrchestrateError",
    "Refused",
    "Reply",
    "RunOver",
    "Sandbox",
    "SandboxFailure",
    "SandboxLimits",
    "Taken",
    "Task",
    "ToolCall",
    "Unreachable",
    "__version__",
    "environment",
    "main",
    "work",
]
