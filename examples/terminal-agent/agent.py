"""An agent that types into a terminal, as Terminus does: the model replies with keystrokes in JSON, without tools.

Chat Completions, streamed, with nothing but Python's standard library.
"""

import json
import os
import pty
import re
import subprocess
import termios
import threading
import time
import urllib.request

INSTRUCTIONS = """You control a terminal. Reply with one JSON object:
{"analysis": "...", "plan": "...", "commands": [{"keystrokes": "ls\\n", "duration": 1.0}], "task_complete": false}
Keystrokes are typed as they are. `duration` is how many seconds to wait before the screen is shown.

Task:
"""
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")


class Terminal:
    """A shell on a pseudo-terminal, whose output a thread collects."""

    def __init__(self):
        self.master, slave = pty.openpty()
        mode = termios.tcgetattr(slave)
        # A line of a canonical terminal is cut at 4,095 bytes.
        mode[3] &= ~termios.ICANON
        termios.tcsetattr(slave, termios.TCSANOW, mode)
        shell = ["/bin/bash", "--norc", "--noprofile"]
        env = {**os.environ, "TERM": "dumb", "HISTFILE": ""}
        self.shell = subprocess.Popen(shell, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
        os.close(slave)
        self.output, self.lock = b"", threading.Lock()
        self.reader = threading.Thread(target=self.collect, daemon=True)
        self.reader.start()

    def collect(self):
        try:
            while data := os.read(self.master, 4096):
                with self.lock:
                    self.output = (self.output + data)[-20_000:]
        except OSError:
            pass  # The last process closed the terminal.

    def type(self, keystrokes):
        data = keystrokes.encode()
        while data:
            data = data[os.write(self.master, data) :]

    def new_output(self):
        with self.lock:
            output, self.output = self.output, b""
        return ESCAPES.sub("", output.decode(errors="replace")).replace("\r", "")[-10_000:]


def sample(messages):
    body = json.dumps({"model": os.environ["MODEL"], "messages": messages, "stream": True}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    request.add_header("content-type", "application/json")
    text = ""
    for line in urllib.request.urlopen(request):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"])
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
    return text


def main():
    terminal = Terminal()
    messages = [{"role": "user", "content": INSTRUCTIONS + os.environ["TASK_PROMPT"]}]
    while True:
        text = sample(messages)
        messages.append({"role": "assistant", "content": text})
        try:
            reply = json.loads(text[text.index("{") : text.rindex("}") + 1])
            commands = [(c["keystrokes"], float(c.get("duration", 1))) for c in reply["commands"]]
        except Exception as error:
            messages.append({"role": "user", "content": f"The reply is not valid: {error!r}"})
            continue
        for keystrokes, duration in commands:
            terminal.type(keystrokes)
            time.sleep(min(duration, 60))
        if reply.get("task_complete"):
            break
        messages.append({"role": "user", "content": "New output:\n" + terminal.new_output()})
    # What was typed before is done first.
    terminal.type("\nexit\n")
    terminal.shell.wait()


main()
