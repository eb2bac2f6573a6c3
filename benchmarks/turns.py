"""Processes that prepare at once and measure one at a time: what is slow is done in parallel, what is timed alone.

A child says lines of JSON. When it is ready it waits for a line on its standard input, then measures. One that dies,
hangs or is late is ended and named; the others go on.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time


def take_turn(prepare):
    """The child's side. `prepare()` gives a function, whose rows are said in its turn, and what to say before that."""
    said, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # what others print is no line of ours
    os.dup2(2, 1)

    def say(**fields):
        print(json.dumps(fields), file=said, flush=True)

    try:
        measure, about = prepare()
        say(ready=about)
        if not sys.stdin.readline():  # the parent is gone
            return
        for row in measure():
            say(row=row)
        say(done=True)
    except Exception as error:
        say(failed=f"{type(error).__name__}: {str(error)[:300]}")


class Worker:
    """A child: `state` is waiting, preparing, ready, measuring, done, or lost."""

    def __init__(self, name, command, environment=None):
        self.name, self.command = name, command
        self.environment = {**os.environ, **(environment or {})}
        self.state, self.errors, self.process = "waiting", [], None

    def start(self, lines):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(self.command, text=True, env=self.environment, **pipes)
        self.state = "preparing"
        for job in (lambda: self.errors.extend(self.process.stderr), lambda: self._read(lines)):
            threading.Thread(target=job, daemon=True).start()

    def _read(self, lines):
        for line in self.process.stdout:
            try:
                lines.put((self, json.loads(line)))
            except ValueError:
                self.errors.append(line)
        lines.put((self, {"failed": f"ended with code {self.process.wait()}"}))

    def go(self):
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
            self.state = "measuring"
        except OSError:  # it died while it waited; its last line tells
            pass

    def end(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def run(workers, heard, lost, *, jobs, ready_by, done_by, patience):
    """Starts the workers, `jobs` preparing at a time; when all are ready, each measures, in their order.

    `heard(worker, {"ready": ...} or {"row": ...} or {"done": True})` and `lost(worker, why)` are told of what happens.
    `ready_by` and `done_by` are times of time.monotonic(); a turn may take `patience` seconds.
    """
    lines = queue.Queue()

    def listen(until, busy):
        while any(w.state == "waiting" for w in workers) or busy():
            for worker in workers:
                if worker.state == "waiting" and sum(w.state == "preparing" for w in workers) < jobs:
                    worker.start(lines)
            try:
                worker, line = lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return
            if worker.state in ("done", "lost"):
                continue
            if "failed" in line:
                worker.state = "lost"
                lost(worker, line["failed"])
                continue
            if "ready" in line:
                worker.state = "ready"
            elif "done" in line:
                worker.state = "done"
            heard(worker, line)

    def late(worker, why):
        worker.end()
        worker.state = "lost"
        lost(worker, why)

    try:
        listen(ready_by, lambda: any(w.state == "preparing" for w in workers))
        for worker in workers:
            if worker.state in ("waiting", "preparing"):
                late(worker, "was not ready in time")
        for worker in workers:
            if worker.state != "ready":
                continue
            if time.monotonic() >= done_by:
                late(worker, "no time was left for it")
                continue
            worker.go()
            until = min(done_by, time.monotonic() + patience)
            listen(until, lambda worker=worker: worker.state in ("ready", "measuring"))
            if worker.state in ("ready", "measuring"):
                late(worker, "did not finish measuring in time")
            worker.end()
    finally:
        for worker in workers:
            worker.end()
