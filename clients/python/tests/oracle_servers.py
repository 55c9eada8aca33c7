"""An engine and a trainer whose numbers are functions of the tokens, written from the protocols.

A routing row and a log-probability are hashes of the weights' version and of all tokens up to their
own. So every row and every log-probability of a batch can be checked against the sequence that it
is in, without a record of what was sampled when: a row of another prefix, or of other weights than
its label says, does not match.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Answer = Callable[[str, str, Any], tuple[int, Any]]


class Server:
    """An HTTP server whose answers are a function of method, path and body."""

    def __init__(self, answer: Answer) -> None:
        self.faults: list[str] = []
        faults = self.faults

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def reply(self) -> None:
                length = int(self.headers.get("content-length", 0))
                body = json.loads(self.rfile.read(length) or b"null")
                try:
                    status, value = answer(self.command, self.path, body)
                except Exception as error:
                    faults.append("".join(traceback.format_exception(error)))
                    status, value = 400, {"error": {"code": "oracle", "message": repr(error)}}
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = reply

            def log_message(self, *_: Any) -> None:
                pass

        class Threads(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                """A client that is gone needs no answer."""

        self._server = Threads(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def prefixes(tokens: list[int]) -> Iterator[bytes]:
    """A digest of the tokens up to each position."""
    digest = b""
    for token in tokens:
        digest = hashlib.blake2b(struct.pack("<I", token), key=digest, digest_size=16).digest()
        yield digest


class Model:
    """What is sampled, and which experts are chosen."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.layers: int = config["num_hidden_layers"]
        self.experts: int = config["num_experts"]
        self.top_k: int = config["num_experts_per_tok"]
        self.context: int = config["max_position_embeddings"]
        self.vocab: int = config["vocab_size"]

    def shape(self) -> dict[str, Any]:
        """As the trainer protocol has it."""
        return {
            "hidden_layers": self.layers,
            "moe_layers": list(range(self.layers)),
            "experts": self.experts,
            "top_k": self.top_k,
            "vocab": self.vocab,
            "context": self.context,
        }

    def row(self, version: int, prefix: bytes) -> list[int]:
        """The experts of each layer for the last token of a prefix, flat."""
        draw = hashlib.blake2b(
            prefix, key=struct.pack("<q", version), digest_size=2 * self.layers * self.top_k
        ).digest()
        row: list[int] = []
        for layer in range(self.layers):
            left = list(range(self.experts))
            for slot in range(self.top_k):
                (number,) = struct.unpack_from("<H", draw, 2 * (layer * self.top_k + slot))
                row.append(left.pop(number % len(left)))
        return row

    def logprob(self, version: int, prefix: bytes) -> float:
        """The log-probability of the last token of a prefix, as a 32-bit float."""
        digest = hashlib.blake2b(prefix, key=struct.pack("<q", version), person=b"logprob").digest()
        (number,) = struct.unpack_from("<I", digest)
        (value,) = struct.unpack("<f", struct.pack("<f", -3.0 * number / 2**32))
        return float(value)


class Vocabulary:
    """The policy's tokens as text."""

    def __init__(self, folder: Path) -> None:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        self.end, self.special = special["<|im_end|>"], special
        plain = {
            token.replace("Ġ", " ").replace("Ċ", "\n"): number
            for token, number in tokenizer["model"]["vocab"].items()
            if token not in special
        }
        self.tokens = {text: number for text, number in plain.items() if text.isascii()}
        self.texts = {number: text for text, number in self.tokens.items()}

    def spell(self, text: str, draw: random.Random) -> list[int]:
        """Tokens of a text that no tokenizer would choose."""
        ids = []
        while text:
            fits = [text[:length] for length in range(1, 9) if text[:length] in self.tokens]
            piece = draw.choice(fits)
            ids.append(self.tokens[piece])
            text = text[len(piece) :]
        return ids


class OracleEngine:
    """Speaks SGLang's native protocol. Replies name themselves (`[7]` is the seventh), and some
    requests are refused for a moment."""

    def __init__(self, folder: Path) -> None:
        self.model, self.vocabulary = Model(folder), Vocabulary(folder)
        self.version, self.updates, self.aborted = 0, 0, 0
        self._folder, self._lock, self._replies = str(folder), threading.Lock(), 0
        self._paused = threading.Event()
        self.server = Server(self._answer)

    def _answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/generate":
            if random.random() < 0.02:
                return 503, {"error": {"message": "overloaded"}}
            return 200, self._generate(body)
        if path == "/server_info":
            return 200, {
                "version": "0.5.20",
                "model_path": self._folder,
                "context_length": self.model.context,
                "page_size": 1,
                "enable_return_routed_experts": True,
            }
        if path == "/model_info":
            return 200, {"model_path": self._folder, "weight_version": str(self.version)}
        if path == "/pause_generation":
            self._paused.set()
        elif path == "/continue_generation":
            self._paused.clear()
        elif path == "/update_weights_from_disk":
            with self._lock:
                self.version, self.updates = int(body["weight_version"]), self.updates + 1
            return 200, {"success": True, "message": ""}
        elif path.split("?")[0] not in ("/health", "/flush_cache", "/abort_request"):
            return 404, {"error": {"message": f"no route {method} {path}"}}
        return 200, {"success": True}

    def _generate(self, body: Any) -> Any:
        sampling, prompt = body["sampling_params"], body["input_ids"]
        with self._lock:
            version, self._replies = self.version, self._replies + 1
            number = self._replies
        draw = random.Random(f"{sampling['sampling_seed']} {number}")
        output, finish = self._sample(number, draw, sampling["max_new_tokens"])
        time.sleep(draw.choice((0.0, 0.005, 0.02)))
        if self._paused.is_set():
            # Tokens that were sampled before the pause are sent; the client continues the reply.
            output = output[: draw.randrange(len(output) + 1)]
            finish = {"type": "abort"}
            self.aborted += 1
        tokens, low = prompt + output, sampling["temperature"] < 0.1
        all_prefixes = list(prefixes(tokens))
        logprobs = []
        for token, prefix in zip(output, all_prefixes[len(prompt) :], strict=True):
            logprob = 0.0 if low else self.model.logprob(version, prefix)
            logprobs.append([logprob, token, None])
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(output),
            "cached_tokens": max(0, len(prompt) - 1),
            "weight_versions": [{"version": str(version), "start": 0, "end": len(output)}],
            "output_token_logprobs": logprobs,
        }
        if body["return_routed_experts"]:
            start = body.get("routed_experts_start_len", 0)
            rows = [self.model.row(version, prefix) for prefix in all_prefixes[start:-1]]
            data = b"".join(struct.pack(f"<{len(row)}i", *row) for row in rows)
            meta["routed_experts"] = base64.b64encode(data).decode()
        return {"text": "", "output_ids": output, "meta_info": meta}

    def _sample(self, number: int, draw: random.Random, limit: int) -> tuple[list[int], Any]:
        """A reply with or without thinking and a call, and why it ends."""
        vocabulary, ids = self.vocabulary, []
        if draw.random() < 0.3:
            ids += vocabulary.spell(f"<think>\nhm {draw.randrange(9)}\n</think>\n\n", draw)
        ids += vocabulary.spell(f"Look [{number}]", draw)
        if draw.random() < 0.4:
            arguments = json.dumps({"command": f"ls {draw.randrange(3)}"})
            call = f'{{"name": "bash", "arguments": {arguments}}}'
            special = vocabulary.special
            ids += [special["<tool_call>"], *vocabulary.spell(call, draw), special["</tool_call>"]]
        ids.append(vocabulary.end)
        if len(ids) > limit:
            return ids[:limit], {"type": "length", "length": limit}
        return ids, {"type": "stop", "matched": vocabulary.end}


class OracleTrainer:
    """Speaks the trainer protocol, hands every batch to a check, and applies the step."""

    def __init__(
        self, policy: Path, checkpoints: Path, shape: Any, check: Callable[[Path], None]
    ) -> None:
        self._policy, self._checkpoints, self._shape, self._check = (
            policy,
            checkpoints,
            shape,
            check,
        )
        self._version = 0
        self._done: dict[str, Any] = {}
        self.server = Server(self._answer)

    def _answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/info":
            return 200, {
                "protocol_version": 1,
                "trainer": "oracle 1",
                "model": self._shape,
                "algorithms": ["grpo"],
                "policy_version": self._version,
                "lineage": 0,
                "last_step_id": next(reversed(self._done), None),
                "checkpoint": str(self._checkpoint()),
                "world_size": 1,
                "devices": ["none"],
            }
        if path == "/v1/checkpoints":
            return 200, {"checkpoint": str(self._checkpoint()), "policy_version": self._version}
        step = body["step_id"] if method == "POST" else path.rpartition("/")[2]
        if method == "POST" and step not in self._done:
            try:
                tokens, loss_tokens = self._check(Path(body["manifest"]))
            except Exception as error:
                return 200, {"step_id": step, "state": "failed", "error": repr(error)}
            self._version += 1
            mismatch = {
                "kl_k3": 0.0,
                "mean_abs_logprob_diff": 0.0,
                "extreme_token_fraction": {"2": 0.0},
            }
            metrics = {
                **dict.fromkeys(("loss", "grad_norm", "entropy", "clip_fraction", "seconds"), 0.0),
                "tokens": tokens,
                "loss_tokens": loss_tokens,
                "routing_missing": 0,
                "mismatch": mismatch,
            }
            self._done[step] = {
                "policy_version": self._version,
                "checkpoint": str(self._checkpoint()),
                "metrics": metrics,
            }
        if step not in self._done:
            return 404, {"error": {"code": "unknown_step", "message": step}}
        return 200, {"step_id": step, "state": "done", "result": self._done[step]}

    def _checkpoint(self) -> Path:
        """A folder of its own for each version; the engine's weights are its version alone."""
        folder = self._checkpoints / f"v{self._version:06}"
        if not folder.exists():
            folder.mkdir(parents=True)
            for file in self._policy.iterdir():
                (folder / file.name).symlink_to(file)
        return folder
