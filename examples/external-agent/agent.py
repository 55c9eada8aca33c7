"""An external agent that uses only httpx: the protocol of docs/src/agents-external.md.

It answers each task of `rows.jsonl` with one request, and is rewarded for a short reply.
"""

import argparse
import threading
import uuid

import httpx


def beat(http: httpx.Client, path: str, period: float, over: threading.Event) -> None:
    """Sends heartbeats until the episode is over."""
    while not over.wait(period):
        http.post(f"{path}/heartbeat")


def run(http: httpx.Client, episode: dict) -> None:
    """Runs one episode, and returns its reward."""
    path, over = f"/v1/episodes/{episode['lease']}", threading.Event()
    heartbeats = threading.Thread(target=beat, args=(http, path, episode["lease_s"] / 4, over))
    heartbeats.start()
    try:
        reply = http.post(
            episode["openai_path"] + "/chat/completions",
            headers={"authorization": f"Bearer {episode['api_key']}"},
            json={
                "model": episode["model"],
                "messages": [{"role": "user", "content": episode["task"]["prompt"]}],
            },
            timeout=episode["time_s"],
        )
        reply.raise_for_status()
        text = reply.json()["choices"][0]["message"]["content"] or ""
        result = {"reward": 1 / (1 + len(text)), "metrics": {"characters": len(text)}}
    except httpx.HTTPError as error:
        result = {"failure": {"kind": "environment", "message": str(error)}}
    finally:
        over.set()
    heartbeats.join()
    print(episode["attempt"], result, http.post(f"{path}/finish", json=result).json(), flush=True)


def main() -> None:
    """Takes episodes until the run is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:4170", help="the run's gateway")
    with httpx.Client(base_url=parser.parse_args().url, timeout=90) as http:
        while True:
            body = {"worker": "example", "take_id": uuid.uuid4().hex, "wait_s": 25}
            taken = http.post("/v1/episodes/take", json=body)
            if taken.status_code == 410:
                return
            taken.raise_for_status()
            if taken.status_code == 200:
                run(http, taken.json())


if __name__ == "__main__":
    main()
