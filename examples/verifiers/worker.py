"""Plays episodes of a verifiers environment for a run of orchestrate.

The environment, its harness and its rewards are verifiers' own; its training client sends prompts
in tokens to the run's gateway, which keeps every sampled token with its log-probability and routes.
"""

import argparse
import asyncio
import sys

import verifiers.v1 as vf
from verifiers.v1.harnesses.null import NullHarnessConfig
from verifiers.v1.runtimes import SubprocessConfig

import orchestrate


class PlayFailed(Exception):
    """verifiers could not play an episode to its end."""


async def play(env: vf.Env, task: vf.Task, episode: orchestrate.AsyncEpisode, model: str) -> float:
    """Plays one episode, and returns its reward."""
    client = vf.TrainClientConfig(
        base_url=episode.openai_base_url,
        headers={"x-api-key": episode.api_key},
        renderer_model_name=model,
    )
    context = vf.ModelContext(model=episode.model, client=client)
    played = await env.run_episode(task, context)
    if not played.ok:
        errors = [error.message for trace in played.traces for error in trace.errors]
        raise PlayFailed(f"verifiers: {played.errors or errors}")
    return sum(trace.reward for trace in played.traces) / len(played.traces)


async def work(env: vf.Env, gateway: orchestrate.AsyncGateway, model: str) -> None:
    """Plays one episode after the other, until the run is over."""
    tasks = list(env.taskset)
    while True:
        try:
            episode = await gateway.take()
        except orchestrate.RunOver:
            return
        try:
            async with episode:
                reward = await play(env, tasks[episode.task.row["index"]], episode, model)
                await episode.finish(reward)
        except PlayFailed as error:
            # The gateway knows: the attempt is repeated.
            print(error, file=sys.stderr)


async def main() -> None:
    """Plays with some workers until the run is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:4170", help="the run's gateway")
    parser.add_argument("--env", default="short_reply", help="a taskset, as verifiers names it")
    parser.add_argument("--model", required=True, help="folder with the policy's tokenizer")
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    env = vf.SingleAgentEnv(
        vf.SingleAgentEnvConfig(
            taskset=vf.TasksetConfig(id=args.env),
            # A chat without tools: verifiers renders tools for models that it knows.
            agent=vf.AgentConfig(harness=NullHarnessConfig(id="null"), runtime=SubprocessConfig()),
        )
    )
    async with env.serving(), orchestrate.AsyncGateway(args.url) as gateway:
        await asyncio.gather(*(work(env, gateway, args.model) for _ in range(args.workers)))


if __name__ == "__main__":
    asyncio.run(main())
