"""
chat.py: ask a served model one question, and get a value or None.

Concept     A question is a system prompt and a message that may hold pictures, for any server that
            speaks OpenAI's /v1/chat/completions. A value is kept, and not asked for again. A
            failure gives None, and is not kept.
Paper       nothing: CodeV asks a served model to judge, and this is how a model is asked
In          a server's address, a model's name; for each question a prompt, a message, a reader
Out         what the reader makes of the reply, or None
Left out    streaming, tools, conversations of several turns
Read next   rewards.py (what a judge is asked)
"""

import base64
import hashlib
import io
import itertools
import json
import math
import os
import re
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from PIL import Image

T = TypeVar("T")

ADDRESS = re.compile(r"https?://(\[[\da-fA-F:.]+\]|[^/@\s:?#\[\]]+)(:\d{1,5})?(/[^@\s?#]*)?")
# Pixels. Servers refuse a picture below one patch: 28 for Qwen2.5-VL, 32 for Qwen3-VL.
SHORTEST_SIDE = 32
MOST_PIXELS = 2048 * 2048  # of a picture: no picture that a program shows has a longer side
QWEN_PIXELS = 16384 * 28 * 28  # most that Qwen2.5-VL's own preprocessor leaves of a picture
THINNEST = 200  # the longer side by the shorter; servers of Qwen-VL refuse what is thinner
# What servers say with status 400 of a parameter that they do not know.
NO_PARAMETER = re.compile(r"unsupported|n.t support|not permitted|unrecogni[sz]ed|unknown", re.I)
# All up to the end of the last thought; and a thought that does not end.
THINK, FINAL = r"think(ing)?[>\]▷]", r"<\|channel\|>final<\|message\|>"
THOUGHT = re.compile(rf"(?is)^.*([<[◁]/{THINK}|{FINAL})|[<[◁]{THINK}.*|<\|channel\|>analysis.*")


@dataclass(eq=False)
class Chat:
    """One model behind an OpenAI-compatible server. Threads may share it.

    The key that a server may want is the environment's JUDGE_API_KEY. It goes into one header,
    and into no file, log or error. Proxies that the environment names are used.

    A failed connection, a late reply and status 408, 409, 429 or 5xx are tried again. The client
    pauses in between, each time longer, or as long as the server asks. No other failure is: at
    temperature 0 the same request gives the same reply. But a server that refuses the parameter
    temperature or max_tokens is asked without it from then on.

    Raises ValueError for an address or a key of the wrong form.
    """

    url: str  # http://host:8000/v1, with or without /chat/completions; several by commas
    model: str
    cache: Path | None = None  # folder of values: each process adds a .jsonl file of its own
    concurrency: int = 8  # most questions in work at a time; the others wait
    attempts: int = 4  # most tries of one question
    seconds: float = 60.0  # longest silence of the server in one try
    patience: float = 180.0  # seconds for one question, with all tries and pauses
    max_tokens: int = 2048  # of a reply; in `seconds` 34 a second. One that thinks may need more

    def __post_init__(self) -> None:
        import openai  # here, as it takes a second that only those with a server should pay

        key = os.environ.get("JUDGE_API_KEY", "").strip()
        urls = [url.strip() for url in self.url.split(",")]
        if not all(map(ADDRESS.fullmatch, urls)) or not re.fullmatch("[!-~]*", key):
            raise ValueError(
                "the model's address should look like http://host:8000/v1, without a key in it; "
                "that goes into the environment, as JUDGE_API_KEY, in ASCII and without spaces"
            )
        urls = [url.rstrip("/").removesuffix("/chat/completions") for url in urls]
        key = key or "no-key"  # never the environment's key of another server
        how = {"api_key": key, "max_retries": self.attempts - 1, "timeout": self.seconds}
        self.clients = [openai.OpenAI(base_url=url, **how) for url in urls]
        self.url, self.turns = ",".join(urls), itertools.count()
        self.options = {"temperature": 0, "max_tokens": self.max_tokens}
        self.seats, self.lock = threading.BoundedSemaphore(self.concurrency), threading.Lock()
        self.heard, self.last_problem = False, ""  # has it ever replied; what went wrong last
        self.known: dict[str, object] = {}  # hash of a question: its value
        self.asking: dict[str, Future] = {}  # hash of a question that is in work
        if self.cache is not None:
            self.cache.mkdir(parents=True, exist_ok=True)
            parts = (p.read_text("utf-8", errors="replace") for p in self.cache.glob("*.jsonl"))
            for line in "\n".join(parts).splitlines():
                with suppress(ValueError, LookupError, TypeError, RecursionError):
                    kept = json.loads(line)  # a broken line is asked again
                    self.known[kept["key"]] = kept["value"]

    def ask(self, system: str, content: str | list[dict], read: Callable[[str], T]) -> T | None:
        """What `read` makes of the reply, or None if there is nothing to be had.

        content  a text, or a list of `text_part` and `picture_part`
        read     text of the reply -> a value, kept as JSON (a tuple comes back as a list) and
                 never None. Raises ValueError for a reply of no use. What was kept is not read
                 again, so a question should always have the same reader.

        Raises RuntimeError if the server, before any reply, refuses our key, address or model.
        """
        roles = {"system": system, "user": content}
        messages = [{"role": role, "content": said} for role, said in roles.items()]
        # What a program printed may hold half of a surrogate pair, which UTF-8 cannot write.
        asked = json.dumps([self.model, messages], ensure_ascii=False).encode(errors="replace")
        key = hashlib.sha256(asked).hexdigest()
        with self.lock:
            if key in self.known:
                return self.known[key]
            told = self.asking.setdefault(key, mine := Future())
        if told is not mine:  # another thread asks this already
            return told.result()
        try:
            with self.seats:
                value = self._in_time(json.loads(asked)[1], read)
            if value is not None:
                value = self._keep(key, value)
            told.set_result(value)
            return value
        except BaseException as error:
            told.set_exception(error)
            raise
        finally:
            del self.asking[key]

    def _keep(self, key: str, value: object) -> object:
        line = json.dumps({"key": key, "value": value})
        with self.lock:
            self.known[key] = json.loads(line)["value"]
            if self.cache is not None:
                path = self.cache / f"{socket.gethostname()}-{os.getpid()}.jsonl"
                with open(path, "a") as file:
                    file.write(f"\n{line}\n")  # the line before may have been cut short
        return self.known[key]

    def _in_time(self, messages: list[dict], read: Callable[[str], T]) -> T | None:
        """The answer; None once patience ends. What drips for ever is left to itself."""
        told: Future = Future()

        def work() -> None:
            try:
                told.set_result(self._answer(messages, read))
            except BaseException as error:  # it belongs to whoever waits below
                told.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        try:
            return told.result(self.patience)
        except TimeoutError:
            self.last_problem = f"no whole answer within {self.patience:g} s; {self.last_problem}"
            return None

    def _answer(self, messages: list[dict], read: Callable[[str], T]) -> T | None:
        import openai

        first = next(self.turns) % len(self.clients)  # they take turns
        others = iter(self.clients[first:] + self.clients[:first])
        client = next(others)
        while True:
            options = self.options
            try:
                return read(self._post(client, messages, options))
            except openai.APIStatusError as error:
                status, said = error.status_code, error.response.text
                # The first that is named: others may be there as advice.
                named = min((o for o in options if o in said), key=said.find, default=None)
                if status in (400, 422) and named and NO_PARAMETER.search(said):
                    self.options = {o: options[o] for o in options if o != named}
                    continue
                # A server that refuses a key may quote parts of it.
                said = "" if status in (401, 403) else said.replace(client.api_key, "(key)")
                self.last_problem = f"status {status}: {said[:150]!r}"
                # Some servers say with 400 that they do not know the model.
                unknown = re.search(rf"(?<!\w){re.escape(self.model)}(?!\w)", said)
                refused = status in (401, 403, 404) or status == 400 and unknown
                if refused and not self.heard:
                    raise RuntimeError(
                        f"{self.url} answers with {self.last_problem}: check this address, the "
                        f"model's name, {self.model}, and the key in JUDGE_API_KEY"
                    ) from None
            except openai.APIConnectionError as error:
                cause = error.__cause__ or error
                self.last_problem = f"{type(cause).__name__}: {cause}"
                if client := next(others, None):  # one that is down leaves it to the next
                    continue
            except ValueError as error:
                self.last_problem = str(error)
            return None

    def _post(self, client, messages: list[dict], options: dict) -> str:
        """Text of the reply. Raises ValueError if it is no chat completion, or was cut."""
        post = client.chat.completions.with_raw_response.create
        reply = post(model=self.model, messages=messages, **options).content
        try:
            choice = json.loads(reply)["choices"][0]
            text, why = str(choice["message"]["content"] or ""), choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ValueError(f"expected a chat completion, got {reply[:80]!r}") from None
        self.heard = True
        if why == "length":
            most = self.max_tokens
            raise ValueError(f"the reply was cut at {most} tokens: raise --judge-tokens")
        return text


def json_object(text: str) -> dict:
    """The last JSON object of a reply: after any thought, be it in a code fence or among words.
    Raises ValueError if there is none, or one with a field twice, or several that differ.

    >>> json_object('<think>{"score": 1}?</think> So: {"score": 0}')
    {'score': 0}
    """

    def once(pairs: list[tuple[str, object]]) -> dict:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a field stands there twice")
        return dict(pairs)

    said = THOUGHT.sub("", text)
    decoder, found, at = json.JSONDecoder(object_pairs_hook=once, strict=False), {}, 0
    try:
        while start := re.compile(r'\{\s*"').search(said, at):
            value, at = decoder.raw_decode(said, start.start())
            found[json.dumps(value, sort_keys=True)] = value
        (value,) = found.values()
        return value
    except (ValueError, RecursionError) as error:
        shown = (said.strip() or text)[:80]
        raise ValueError(f"expected one JSON object; got {shown!r}") from error


def text_part(text: str) -> dict:
    return {"type": "text", "text": text}


def picture_part(image: Image.Image, most: int = MOST_PIXELS) -> dict:
    """A picture as a JPEG, with at most `most` pixels and no side below SHORTEST_SIDE. Only one
    that is too thin for both, or THINNEST, changes shape."""
    scale = (most / math.prod(image.size)) ** 0.5
    scale = min(scale, max(1.0, SHORTEST_SIDE / min(image.size)))
    least = max(SHORTEST_SIDE, round(min(image.size) * scale))
    size = [min(max(least, round(side * scale)), THINNEST * least) for side in image.size]
    buffer = io.BytesIO()
    image.convert("RGB").resize(size, reducing_gap=2.0).save(buffer, "JPEG", quality=95)
    url = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


class VerdictWatch:
    """Stops a run whose judge falls silent, before it learns from few verdicts. Called with what
    each trajectory of a step earned, None for no verdict. Raises RuntimeError if, in the last
    `steps` steps, more than the share `most` of the trajectories have no verdict."""

    def __init__(self, most: float = 0.2, steps: int = 3) -> None:
        self.most, self.counts = most, deque(maxlen=steps)

    def __call__(self, totals: list[float | None], judge: object = None) -> None:
        self.counts.append((totals.count(None), len(totals)))
        silent, asked = map(sum, zip(*self.counts))
        if silent > self.most * asked:
            problem = getattr(judge, "last_problem", "") or "it says nothing more"
            raise RuntimeError(
                f"stopped: {silent} of the last {asked} trajectories have no verdict, expected at "
                f"most {self.most:.0%}. Look after the judge (its last problem: {problem}), then "
                "resume; verdicts in its cache are not asked again."
            )
