"""Runs episodes of a verifiers environment for a run of orchestrate.

The environment, its harness and its rewards are those of verifiers. Its training client sends
tokenised prompts to the run's gateway, which keeps every sampled token with its log-probability
and routing row.
"""

import argparse
import asyncio
import sys

import verifiers.v1 as vf
from verifiers.v1.harnesses.null import NullHarnessConfig
from verifiers.v1.runtimes import SubprocessConfig

import orchestrate


class EpisodeFailed(Exception):
    """verifiers could not complete an episode."""


async def run(env: vf.Env, task: vf.Task, episode: orchestrate.AsyncEpisode, model: str) -> float:
    """Runs one episode, and returns its reward."""
    client = vf.TrainClientConfig(
        base_url=episode.openai_base_url,
        headers={"x-api-key": episode.api_key},
        renderer_model_name=model,
    )
    context = vf.ModelContext(model=episode.model, client=client)
    result = await env.run_episode(task, context)
    if not result.ok:
        errors = [error.message for trace in result.traces for error in trace.errors]
        raise EpisodeFailed(f"verifiers: {result.errors or errors}")
    return sum(trace.reward for trace in result.traces) / len(result.traces)


async def work(env: vf.Env, gateway: orchestrate.AsyncGateway, model: str) -> None:
    """Runs one episode after another, until the run is over."""
    tasks = list(env.taskset)
    while True:
        try:
            episode = await gateway.take()
        except orchestrate.RunOver:
            return
        try:
            async with episode:
                reward = await run(env, tasks[episode.task.row["index"]], episode, model)
                await episode.finish(reward)
        except EpisodeFailed as error:
            # The failure was reported to the gateway, which retries the attempt.
            print(error, file=sys.stderr)


async def main() -> None:
    """Runs episodes with several workers until the run is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:4170", help="the run's gateway")
    parser.add_argument("--env", default="short_reply", help="a taskset, as verifiers names it")
    parser.add_argument("--model", required=True, help="folder with the policy's tokenizer")
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    env = vf.SingleAgentEnv(
        vf.SingleAgentEnvConfig(
            taskset=vf.TasksetConfig(id=args.env),
            # A chat without tools: verifiers renders tools only for models that it knows.
            agent=vf.AgentConfig(harness=NullHarnessConfig(id="null"), runtime=SubprocessConfig()),
        )
    )
    async with env.serving(), orchestrate.AsyncGateway(args.url) as gateway:
        await asyncio.gather(*(work(env, gateway, args.model) for _ in range(args.workers)))


if __name__ == "__main__":
    asyncio.run(main())
