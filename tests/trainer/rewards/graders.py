"""Reward functions for the tests, good and bad; workers import them by the path of this file."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from metagrpo.trainer.rewards import batched

LEAKED = []


def length(prompts, completions, completion_ids, **columns):
    return [float(len(completion)) for completion in completions]


def tokens(completion_ids, **columns):
    return [len(ids) for ids in completion_ids]


def sometimes(completions, **columns):
    """Acts on the completion's first word; anything else scores 7."""
    return [_act(completion) for completion in completions]


def whole_return(completions, **columns):
    """What a call returns, in place of a list of one number."""
    kind = completions[0]
    if kind == "ok":
        return [1.0]
    return {"bare": None, "number": 1.0, "short": [], "long": [1.0, 2.0], "text": "1"}[kind]


def endless(completions, **columns):
    while True:
        yield 1.0


def pid(completions, **columns):
    return [float(os.getpid()) for _ in completions]


def leak(completions, **columns):
    LEAKED.append(b"x" * (32 << 20))
    return [float(os.getpid())]


def chatter(completions, **columns):
    print("to stdout " * 10_000)
    print("to stderr", file=sys.stderr)
    return [1.0]


def child(completions, directory, **columns):
    """Starts a process of its own, notes its number and hangs."""
    process = subprocess.Popen(["sleep", "600"])
    Path(directory[0], "pid").write_text(str(process.pid))
    time.sleep(600)


def scaled(completions, factor, **columns):
    return [factor * len(completion) for completion in completions]


def echo(prompts, completions, completion_ids, number, **columns):
    """Checks that the arguments of one sample belong together."""
    for prompt, completion, ids, value in zip(prompts, completions, completion_ids, number, strict=True):
        assert prompt == f"p{value}" and completion == f"c{value}" and ids == [value]
    return [float(value) for value in number]


def strict(prompts, completions, completion_ids, answer):
    return [float(completion == gold) for completion, gold in zip(completions, answer, strict=True)]


def loaded_modules(completions, **columns):
    return [float(any(name in sys.modules for name in ("torch", "transformers", "sympy", "pydantic")))]


@batched
def centred(completions, **columns):
    """Compares the batch: each length less their mean."""
    lengths = [len(completion) for completion in completions]
    return [value - sum(lengths) / len(lengths) for value in lengths]


@batched
def centred_fragile(completions, **columns):
    if "exit" in completions:
        os._exit(3)
    return [None if completion == "none" else float(len(completion)) for completion in completions]


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def _act(completion):
    match completion:
        case "hang":
            time.sleep(600)
        case "spin":
            while True:
                pass
        case "raise":
            raise KeyError("missing key")
        case "unprintable":
            raise Unprintable
        case "sys_exit":
            sys.exit(1)
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "none":
            return None
        case "nan":
            return float("nan")
        case "inf":
            return float("inf")
        case "string":
            return "1.0"
        case "nested":
            return [1.0]
        case "huge":
            raise ValueError("x" * 50_000_000)
        case "bool":
            return True
    return 7
