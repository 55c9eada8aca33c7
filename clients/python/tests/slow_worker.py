"""A worker that records which results were acknowledged. Its environment asks the policy once.

Arguments: URL, file, and how many seconds it holds an episode after the reply.
"""

import sys
import time
from pathlib import Path

import orchestrate


def main() -> None:
    """Takes episodes until the run is over."""
    file, pause = Path(sys.argv[2]), float(sys.argv[3])
    with orchestrate.Gateway(sys.argv[1]) as gateway, file.open("a") as acknowledged:

        def run(episode: orchestrate.Episode) -> None:
            with episode:
                reply = episode.chat([{"role": "user", "content": episode.task.prompt}])
                time.sleep(pause)
                print(f"asked {episode.taken.attempt}", file=acknowledged, flush=True)
                outcome = episode.finish(len(reply.content) % 2, {"calls": len(reply.tool_calls)})
                print(f"{outcome} {episode.taken.attempt}", file=acknowledged, flush=True)

        while True:
            try:
                run(gateway.take())
            except orchestrate.LeaseOver as error:
                print(f"over {error}", file=acknowledged, flush=True)
            except orchestrate.RunOver:
                return


main()
