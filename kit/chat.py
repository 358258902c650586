"""
chat.py: ask a served model one question, and get a value or None.

Concept     A question is a system prompt and a message that may hold pictures. Any server that
            speaks OpenAI's /v1/chat/completions can answer it. A value is kept and not asked for
            again. A failure gives None and is not kept.
Paper       nothing: CodeV asks a served model to judge, and this is how a model is asked
In          a server's address, a model's name; for each question a prompt, a message, a reader
Out         what the reader makes of the reply, or None
Left out    streaming, tools, conversations of several turns
Read next   rewards.py (what a judge is asked)
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TypeVar

from PIL import Image

T = TypeVar("T")

ADDRESS = re.compile(r"https?://(\[[\da-fA-F:.]+\]|[^/@\s:?#\[\]]+)(:\d{1,5})?(/[^@\s?#]*)?")
LARGEST_REPLY = 1 << 20  # bytes
# Pixels. Servers refuse a picture below one patch: 28 for Qwen2.5-VL, 32 for Qwen3-VL.
SHORTEST_SIDE = 32

# What servers say with status 400, in small letters: no such parameter; no such model or key.
NO_PARAMETER = re.compile(r"unsupported|n.t support|not permitted|unrecogni[sz]ed|unknown")
NO_ACCESS = re.compile(
    r"model.{0,200}?(not|n.t)[ _](exist|found)|"
    r"(invalid|unknown|no such|not a valid) model|api.?key"
)
THOUGHT_BEGINS = re.compile(r"<think(?:ing)?>|\[think\]|◁think▷", re.I)
THOUGHT_ENDS = re.compile(r"</think(?:ing)?>|\[/think\]|◁/think▷", re.I)


@dataclass(eq=False)
class Chat:
    """One model behind an OpenAI-compatible server. Threads may share it.

    The key that a server may want is the environment's JUDGE_API_KEY. It goes into one header,
    and into no file, log or error. Proxies that the environment names are used.

    Tried again: a connection that fails, a reply that is late or no chat completion, and status
    408, 409, 425, 429 and 5xx. A pause is as long as ours or as the server asks (Retry-After),
    whichever is longer. If `patience` ends before the pause does, the question is given up.
    Not tried again: any other status, a reply that was cut at the limit of tokens, and one that
    the reader refuses, because at temperature 0 the same request gives the same reply.
    Asked in another way, which is not counted: a server that refuses max_tokens is asked with
    max_completion_tokens; one that refuses that too, or temperature 0, is asked without.

    Raises ValueError for an address or a key of the wrong form.
    """

    url: str  # http://host:8000/v1, with or without /chat/completions
    model: str
    cache: Path | None = None  # folder of values: each process adds a .jsonl file of its own
    concurrency: int = 8  # most questions in work at a time; the others wait
    attempts: int = 4  # most tries of one question
    wait: float = 1.0  # seconds of the first pause; each later one is twice the one before
    seconds: float = 60.0  # most for one try
    patience: float = 180.0  # seconds; most for all tries and pauses of one question
    # Most tokens of a reply. A model that does not think stops long before, so the limit costs
    # it nothing. One that thinks may need this many; within `seconds` they are 34 a second.
    max_tokens: int = 2048

    def __post_init__(self) -> None:
        import openai  # here, as it takes a second that only those with a server should pay

        self.key = os.environ.get("JUDGE_API_KEY", "").strip()
        if not ADDRESS.fullmatch(self.url) or not re.fullmatch("[!-~]*", self.key):
            raise ValueError(
                "the model's address should look like http://host:8000/v1, without a key in it; "
                "that goes into the environment, as JUDGE_API_KEY, in ASCII and without spaces"
            )
        self.url = self.url.rstrip("/").removesuffix("/chat/completions")
        hooks = {"request": [_begin], "response": [_read_whole]}
        # None of what the environment says of another server (OPENAI_...) goes to this one.
        names = ("OpenAI-Organization", "OpenAI-Project")
        self.client = openai.OpenAI(
            base_url=self.url,
            api_key=self.key or "none",
            default_headers=dict.fromkeys(names, openai.Omit()),
            max_retries=0,  # its own tries do not know our patience
            http_client=openai.DefaultHttpxClient(event_hooks=hooks, follow_redirects=False),
        )
        self.options = {"temperature": 0, "max_tokens": self.max_tokens}
        self.seats, self.lock = threading.BoundedSemaphore(self.concurrency), threading.Lock()
        self.heard, self.last_problem = False, ""  # has it ever replied; what went wrong last
        self.known: dict[str, object] = {}  # hash of a question: its value
        if self.cache is not None:
            self.cache.mkdir(parents=True, exist_ok=True)
            for path in sorted(self.cache.glob("*.jsonl")):
                for line in path.read_text("utf-8", errors="replace").splitlines():
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
        if key not in self.known:
            with self.seats:
                value = self._persist(json.loads(asked)[1], read)
            if value is None:
                return None
            line = json.dumps({"key": key, "value": value})
            with self.lock:
                self.known[key] = json.loads(line)["value"]
                if self.cache is not None:
                    path = self.cache / f"{socket.gethostname()}-{os.getpid()}.jsonl"
                    with open(path, "a") as file:
                        file.write(f"\n{line}\n")  # the line before may have been cut short
        return self.known[key]

    def _persist(self, messages: list[dict], read: Callable[[str], T]) -> T | None:
        """Try until there is a value, or tries or time are used up."""
        import openai

        options, pause, tries = self.options, self.wait, 0
        end = time.monotonic() + self.patience
        while True:
            after, refused = 0.0, False
            try:
                return read(self._post(messages, options, end))
            except openai.APIStatusError as error:
                status, said = error.status_code, error.response.text
                reason = said.lower() if status in (400, 422) else ""
                if (simpler := simplified(options, reason)) != options:
                    options = simpler
                    continue
                refused = status < 400 or status in (401, 403, 404) or NO_ACCESS.search(reason)
                again = status >= 500 or status in (408, 409, 425, 429)
                after = seconds_asked_for(error.response.headers)
                # A server that refuses a key may quote parts of it.
                shown = "" if status in (401, 403) else said.replace(self.key or "\0", "(key)")
                self.last_problem = f"status {status}: {shown[:150]!r}"
            except (openai.APIConnectionError, OSError) as error:
                cause, again = error.__cause__ or error, True
                self.last_problem = f"{type(cause).__name__}: {cause}"
            except ValueError as error:
                self.last_problem, again = str(error), "temperature" not in options
            if refused and not self.heard:
                raise RuntimeError(
                    f"{self.url} answers with {self.last_problem}: check this address, the "
                    f"model's name, {self.model}, and the key in JUDGE_API_KEY"
                )
            tries, pause = tries + 1, max(pause, after)
            if not again or tries >= self.attempts or time.monotonic() + pause >= end:
                return None
            time.sleep(pause)
            pause *= 2

    def _post(self, messages: list[dict], options: dict, end: float) -> str:
        """Text of the reply. ConnectionError: no chat completion. ValueError: it was cut."""
        reply = self.client.chat.completions.with_raw_response.create(
            model=self.model,
            messages=messages,
            timeout=max(min(self.seconds, end - time.monotonic()), 0.01),
            **options,
        ).content
        try:
            choice = json.loads(reply)["choices"][0]
            text, why = str(choice["message"]["content"] or ""), choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ConnectionError(f"no chat completion: {reply[:80]!r}") from None
        self.heard, self.options = True, options
        if why == "length":
            raise ValueError(f"the reply was cut at max_tokens={self.max_tokens}: allow more")
        return text


def _begin(request) -> None:
    request.extensions["end"] = time.monotonic() + request.extensions["timeout"]["read"]


def _read_whole(response) -> None:
    """Read a body within the time of a try. The client's limit begins anew at each piece."""
    import httpx2

    body = b""
    for piece in response.stream:
        body += piece
        if len(body) > LARGEST_REPLY or time.monotonic() > response.request.extensions["end"]:
            raise ConnectionError(f"a reply too long or slow: {len(body)} bytes, no end yet")
    response.stream.close()
    response.stream = httpx2.ByteStream(body)


def simplified(options: dict, refusal: str) -> dict:
    """The options without the one that the server's words refuse, or with its newer name."""
    named = re.search("|".join(options), refusal)  # the first: others may be there as advice
    if not named or not NO_PARAMETER.search(refusal):
        return options
    left = {name: value for name, value in options.items() if name != named[0]}
    if named[0] == "max_tokens":
        left["max_completion_tokens"] = options["max_tokens"]
    return left


def seconds_asked_for(headers) -> float:
    """The pause that a server asks for: milliseconds, seconds, or until a date."""
    after = headers.get("retry-after", "")
    with suppress(ValueError):
        return float(headers.get("retry-after-ms", "")) / 1000
    with suppress(ValueError):
        return float(after)
    with suppress(ValueError):
        return parsedate_to_datetime(after).timestamp() - time.time()
    return 0.0


def json_object(text: str) -> dict:
    """The last JSON object of a reply: after any thought, be it in a code fence or among words.
    Raises ValueError if there is none, or one with a field twice, or several that differ.

    >>> json_object('<think>{"score": 1}?</think> So: {"score": 0}')
    {'score': 0}
    """
    said = THOUGHT_BEGINS.split(THOUGHT_ENDS.split(text)[-1])[0]
    decoder, found, at = json.JSONDecoder(object_pairs_hook=_fields), {}, 0
    try:
        while start := re.compile(r'\{\s*"').search(said, at):
            value, at = decoder.raw_decode(said, start.start())
            found[json.dumps(value, sort_keys=True)] = value
        (value,) = found.values()
        return value
    except (ValueError, RecursionError) as error:
        shown = (said.strip() or text)[:80]
        raise ValueError(f"expected one JSON object; got {shown!r}") from error


def _fields(pairs: list[tuple[str, object]]) -> dict:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a field stands there twice")
    return dict(pairs)


def text_part(text: str) -> dict:
    return {"type": "text", "text": text}


def picture_part(image: Image.Image, longest: int = 2048) -> dict:
    """A picture as a JPEG, with no side above `longest` pixels and none below SHORTEST_SIDE.
    Only a picture that is too thin for both changes its shape."""
    scale = min(longest / max(image.size), max(1.0, SHORTEST_SIDE / min(image.size)))
    size = tuple(max(SHORTEST_SIDE, round(side * scale)) for side in image.size)
    buffer = io.BytesIO()
    image.convert("RGB").resize(size, reducing_gap=2.0).save(buffer, "JPEG", quality=95)
    url = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
