"""python -m pytest tests/test_chat.py      a server that fails in many ways"""

import base64
import io
import json
import logging
import os
import re
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from PIL import Image

from kit.chat import MOST_PIXELS, Chat, VerdictWatch, json_object, picture_part, text_part

KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """Nobody sleeps: the seconds of each pause."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("JUDGE_API_KEY", f" {KEY}\n")  # it is stripped
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    return slept


def says(text, why="stop"):
    """The body of a chat completion."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": why}
    return json.dumps({"choices": [choice]}).encode()


def error(status, message, **headers):
    return status, headers, json.dumps({"error": {"message": message}}).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    log_message = lambda self, *args: None  # noqa: E731

    def do_POST(self):
        server, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        with server.lock:
            server.bodies.append(json.loads(body))
            server.heads.append((self.path, self.headers.as_string()))
            play = server.script.pop(0) if len(server.script) > 1 else server.script[0]
        if (play := play(self) if callable(play) else play) is None:
            return
        status, headers, content = play if isinstance(play, tuple) else (200, {}, play)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


class Server(ThreadingHTTPServer):
    """Plays its script, one entry a request, the last one for ever: a body, a (status, headers,
    body), or a function of the handler that does what it likes with the connection."""

    daemon_threads, block_on_close = True, False
    handle_error = lambda self, *client: None  # it has left  # noqa: E731

    def __init__(self, *script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.bodies, self.heads = list(script), [], []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.lock, self.over = threading.Lock(), threading.Event()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()
        return self

    def __exit__(self, *error):
        self.over.set()
        self.shutdown()
        self.server_close()


def ask(server, text="Which?", **changes):
    """(value, Chat) of one question."""
    it = Chat(server.url, "m", **changes)
    return it.ask("Be brief.", text, str.upper), it


@pytest.mark.parametrize("suffix", ["", "/", "/chat/completions", "/chat/completions/"])
def test_a_question_is_one_plain_request_and_its_value_is_what_the_reader_makes_of_it(suffix):
    with Server(says("yes")) as server:
        server.url += suffix
        assert ask(server)[0] == "YES"
    roles = {"system": "Be brief.", "user": "Which?"}
    messages = [{"role": role, "content": said} for role, said in roles.items()]
    whole = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 2048}
    ((path, headers),) = server.heads
    assert server.bodies == [whole] and path == "/v1/chat/completions"
    assert f"authorization: bearer {KEY}\n" in headers.lower()


@pytest.mark.parametrize("url, key", [
    *((url, KEY) for url in (
        "h:8000/v1", "ftp://h/v1", "http://user:sk-key@h/v1", "http://h/v1?key=sk-key", "",
        "http://h/v1#sk-key", "http://h:port/v1", "http:///v1", "http://h /v1", "http://h/v1,no",
    )),
    *(("http://h/v1", key) for key in ("sk-a\nb", "sk-a b", "sk-…")),
])  # fmt: skip
def test_an_address_or_a_key_of_the_wrong_form_is_refused_unseen(url, key, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", key)
    with pytest.raises(ValueError, match="http://host:8000/v1.*JUDGE_API_KEY") as told:
        Chat(url, "m")
    assert "sk-" not in str(told.value)


def test_pictures_arrive_in_order_odd_text_in_part_and_all_through_one_connection():
    """Half of a surrogate pair cannot be written in UTF-8."""
    ports, parts = set(), [text_part("\ud800!"), picture_part(Image.new("RGB", (40, 40), "red"))]

    def answer(handler):
        ports.add(handler.client_address[1])
        return says("yes")

    with Server(answer) as server:
        it = Chat(server.url, "m")
        questions = ["one", "two", [*parts, text_part("last")]]
        assert [it.ask("s", asked, str) for asked in questions] == ["yes"] * 3
    sent = server.bodies[2]["messages"][1]["content"]
    assert sent == [text_part("?!"), parts[1], text_part("last")] and len(ports) == 1


# What may go wrong (each: bounded time, and None)
@pytest.mark.parametrize("trouble", [
    lambda handler: handler.connection.shutdown(2), error(500, "oops"), error(429, "busy"),
    error(408, "too slow"),
])  # fmt: skip
def test_a_server_in_trouble_is_asked_again(trouble, pauses):
    with Server(trouble) as server:
        got, it = ask(server, attempts=3)
        assert got is None and it.last_problem and len(server.bodies) == 3 and len(pauses) == 2
        server.script = [trouble, says("yes")]
        assert it.ask("s", "another", str) == "yes"


@pytest.mark.parametrize("reply, problem", [
    *((body, "expected a chat completion, got b") for body in (
        b"<html><body>502 Bad Gateway</body></html>", b"", b'{"choices": []}', b'{"choices": null}',
        b'{"choices": [5]}', b'{"error": "model is loading"}', b"[]", b"[" * 100_000, b"\xff\xfe{}",
    )),
    *((says(text), "convert") for text in ("perhaps", "", None)),
    (says("1", "length"), "cut at 77 tokens"),
    *((error(status, "it holds 9 images"), f"status {status}: .*it holds 9 images")
      for status in (400, 402, 405, 413, 415, 422)),
    *((error(400, said), f"status 400: .*{said}") for said in (
        "this model takes no images", "image not found", "model judge-9 does not exist",
        "max_tokens or max_completion_tokens is too large: 2048. The context has 1000.",
    )),
])  # fmt: skip
def test_what_never_gets_better_is_named_and_asked_once(reply, problem, pauses):
    with Server(reply) as server:
        it = Chat(server.url, "m", max_tokens=77)
        assert it.ask("s", "u", float) is None and re.search(problem, it.last_problem)
    assert [sent["max_tokens"] for sent in server.bodies] == [77] and not pauses


def test_a_server_that_is_not_there_or_never_answers_is_given_up(pauses):
    it = Chat("http://127.0.0.1:9/v1", "m")
    assert it.ask("s", "u", str) is None
    assert "ConnectError" in it.last_problem and len(pauses) == 3
    with Server(lambda handler: server.over.wait(60) and None) as server:
        got, it = ask(server, seconds=0.05, attempts=2)
    assert got is None and "ReadTimeout" in it.last_problem and len(server.bodies) == 2


def test_a_reply_that_drips_for_ever_ends_with_our_patience():
    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        while not server.over.wait(0.02):  # each byte comes sooner than `seconds`
            handler.wfile.write(b" ")
            handler.wfile.flush()

    with Server(drip) as server:
        got, it = ask(server, attempts=1, seconds=5, patience=0.3)
        assert got is None and "no whole answer within 0.3 s" in it.last_problem


def test_pauses_grow_and_are_as_long_as_the_server_asks(pauses):
    busy = error(429, "busy")
    with Server(busy, busy, error(429, "busy", **{"Retry-After": "50"}), says("1")) as server:
        assert ask(server, attempts=4)[0] == "1" and len(server.bodies) == 4
    assert 0 < pauses[0] < pauses[1] < pauses[2] == 50


NEWER = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize("refusals, left", [
    ([NEWER], {"temperature": 0}),
    (["temperature does not support 0 with this model"], {"max_tokens": 2048}),
    (["These models don't support parameters: ['temperature']"], {"max_tokens": 2048}),
    (["Unrecognized argument: max_tokens; known: temperature"], {"temperature": 0}),
    ([NEWER, "Unsupported value: 'temperature'"], {}),
])  # fmt: skip
def test_a_refused_parameter_is_left_out_from_then_on(refusals, left, status, pauses):
    with Server(*(error(status, said) for said in refusals), says("yes")) as server:
        got, it = ask(server, attempts=1)
        assert got == "YES" and it.ask("s", "another", str.upper) == "YES"
    assert len(server.bodies) == len(refusals) + 2 and not pauses
    for body in server.bodies[-2:]:
        assert {k: v for k, v in body.items() if k not in ("model", "messages")} == left
    with Server(error(status, "unsupported: temperature, max_tokens")) as server:  # for ever
        assert ask(server)[0] is None and len(server.bodies) == 3


@pytest.mark.parametrize("status, said, model", [
    *((status, "Incorrect API key: sk-very*****", "m") for status in (401, 403, 404)),
    (400, "model judge-9 does not exist", "judge-9"),
])  # fmt: skip
def test_a_wrong_key_address_or_model_is_told_at_once_but_not_in_the_middle(status, said, model):
    with Server(error(status, said), says("yes"), error(status, said)) as server:
        it = Chat(server.url, model)
        advice = f"{status}.*address.*name, {model}, .*JUDGE_API_KEY"
        with pytest.raises(RuntimeError, match=advice):
            it.ask("s", "u", str)
        assert [it.ask("s", text, str) for text in ("v", "w")] == ["yes", None]
        assert len(server.bodies) == 3
        if status in (401, 403):  # whoever refuses a key may quote a part of it
            assert it.last_problem == f"status {status}: ''"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 500])
def test_a_server_that_echoes_the_key_does_not_make_us_tell_it(status, caplog):
    caplog.set_level(logging.DEBUG)
    echo = error(status, "x" * 113 + f" api key {KEY}")  # what is shown ends amid the key
    with Server(echo) as server:
        it, told = Chat(server.url, "m", attempts=1), ""
        try:
            assert it.ask("s", "u", str) is None
        except RuntimeError:
            told = traceback.format_exc()
    assert "sk-" not in told + caplog.text + repr(it) + it.last_problem + str(server.bodies)
    assert it.last_problem and KEY in str(server.heads)


def test_of_the_environment_proxies_are_used_but_nothing_of_another_server(monkeypatch):
    monkeypatch.delenv("JUDGE_API_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    with Server(says("by proxy")) as proxy, Server(says("direct")) as server:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        assert ask(server)[0] == "BY PROXY"
        assert [path for path, _ in proxy.heads] == [f"{server.url}/chat/completions"]
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert ask(server)[0] == "DIRECT"
    assert "sk-of-another" not in str(server.heads + proxy.heads)


# The cache
def test_a_second_run_asks_nothing_and_the_folder_holds_no_key(tmp_path):
    cache = tmp_path / "new" / "folder"
    asked = [("m", "Be brief.", "Which?"), ("n", "Be brief.", "Which?"),
             ("m", "Be long.", "Which?"), ("m", "Be brief.", "Another?")]  # fmt: skip
    with Server(says("yes")) as server:
        for limit in (8, 9):  # with another limit it is the same question
            for model, system, text in asked:
                it = Chat(server.url, model, cache=cache, max_tokens=limit)
                assert [it.ask(system, text, str.upper) for _ in range(2)] == ["YES"] * 2
            assert len(server.bodies) == len(asked)
    (path,) = cache.glob(f"*-{os.getpid()}.jsonl")  # each process has a file of its own
    assert path.read_text().count("YES") == 4 and KEY not in path.read_text()


def test_a_value_is_what_json_gives_back_and_an_error_of_the_reader_is_not_hidden(tmp_path):
    read = lambda text: (0.5, text, None, False)  # noqa: E731
    with Server(says("yes")) as server:
        for folder in (None, tmp_path, tmp_path):  # the first time, too; the third it is known
            it = Chat(server.url, "m", cache=folder)
            assert [it.ask("s", "u", read) for _ in "12"] == [[0.5, "yes", None, False]] * 2
        assert it.ask("s", "v", lambda text: 0) == 0  # a value, though it counts as false
        assert it.ask("s", "v", lambda text: 1) == 0 and len(server.bodies) == 3
        with pytest.raises(KeyError):
            it.ask("s", "w", lambda text: {}[text])


def test_failures_are_not_kept_and_a_line_that_a_kill_cut_is_asked_again(tmp_path):
    with Server(says("perhaps"), error(503, "busy"), says("1")) as server:
        for value in (None, None, 1.0):
            it = Chat(server.url, "m", cache=tmp_path, attempts=1)
            assert it.ask("s", "u", float) == value
        (path,) = tmp_path.iterdir()
        path.write_bytes(path.read_bytes()[:-9])
        for _ in range(2):  # it spoils no other line
            assert Chat(server.url, "m", cache=tmp_path).ask("s", "u", float) == 1.0
        assert len(server.bodies) == 4


# Threads
def test_requests_in_flight_never_exceed_the_limit_and_reach_it():
    both, seats = threading.Barrier(2), threading.Semaphore(2)

    def answer(handler):
        seated = seats.acquire(blocking=False)
        both.wait(30)  # goes on only if two are here at the same time
        server.over.wait(0.02)  # a third would come now
        seats.release()
        return says("yes" if seated else "crowded")

    with Server(answer) as server, ThreadPoolExecutor(8) as pool:
        it = Chat(server.url, "m", concurrency=2)
        got = list(pool.map(lambda i: it.ask("s", f"question {i}", str), range(12)))
    assert got == ["yes"] * 12 and len(server.bodies) == 12


def test_a_question_in_work_is_not_asked_twice():
    """Eight threads, one question: one request, and one value for all; a failure is for all, too,
    and is asked again later."""
    late = lambda body: lambda handler: server.over.wait(0.1) or body  # noqa: E731
    with Server(late(says("yes")), late(error(422, "no")), says("later")) as server:
        it = Chat(server.url, "m")
        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(lambda _: it.ask("s", "u", str), range(8))] == ["yes"] * 8
            assert [*pool.map(lambda _: it.ask("s", "v", str), range(8))] == [None] * 8
        assert len(server.bodies) == 2 and it.ask("s", "v", str) == "later" and not it.asking


def test_several_servers_take_turns_and_one_that_is_down_leaves_it_to_the_next():
    with Server(says("a")) as one, Server(says("b")) as two:
        for first, got in (one.url, "abab"), ("http://127.0.0.1:9/v1", "bbbb"):
            it = Chat(f"{first}, {two.url}/chat/completions", "m", attempts=1)
            assert [it.ask("s", f"question {i}", str) for i in range(4)] == [*got]


def test_what_is_known_does_not_wait_for_what_is_asked():
    taken = threading.Event()
    slow = lambda handler: taken.set() or server.over.wait(60) and says("late")  # noqa: E731
    with Server(says("yes"), slow) as server:
        _, it = ask(server, concurrency=1, attempts=1)
        thread = threading.Thread(target=it.ask, args=("s", "slow", str))
        thread.start()
        assert taken.wait(60)  # the only seat
        assert it.ask("Be brief.", "Which?", str.upper) == "YES"
        server.over.set()
        thread.join()


@pytest.mark.parametrize("text", [
    ' {"score": 0}\n', '```json\n{"score": 0}\n```', '```\n{ "score": 0 }\n```',
    'So {"score": 0}, or again: {"score": 0}', '{\n"score": 0}. Done.',
    '<think>so {"score": 1}?</think>\n{"score": 0}', 'so {"score": 1}?</think>{"score": 0}',
    '<think>a</think><think>{"score": 1}</think>{"score": 0}',
    '<THINKING>1</THINKING>{"score": 0}', '[THINK]{"score": 1}[/THINK]{"score": 0}',
    '◁think▷{"score": 1}◁/think▷{"score": 0}',
    '<|channel|>analysis<|message|>{"score": 1}<|channel|>final<|message|>{"score": 0}',
    r'As \frac{1}{2} = {0.5}, it is {"score": 0}',
])  # fmt: skip
def test_the_object_after_any_thought_is_found(text):
    assert json_object(text) == {"score": 0}


def test_an_object_is_given_whole():
    value = {"reason": 'a "{" and }', "score": 0.5, "more": {"a": [1, None, {"b": True}]}}
    assert json_object(json.dumps(value, indent=1)) == value
    assert json_object('{"reason": "a\nb", "score": 1}') == {"reason": "a\nb", "score": 1}


@pytest.mark.parametrize("text", [
    "", "10", "NaN", '[["score", 1]]', "{}", "{'score': 1}", '{"score": 1',
    '{"score": 1, "score": 1}', '{"score": 0} {"score": 1}', '{"score": 1} {"score": true}',
    '{"score": 1} {"score": 1.0}', '{"more": {"score": 1}, "score": 0', '{"a": {"score": 1},}',
    '{"a": {"score": 0, "score": 1}}', '<think>perhaps {"score": 1}', '{"a":' * 5000,
    '<think>a</think>{"score": 0}</think>', '<think>{"score": 0}</think>', "[" * 5000,
    '{"score": ' + "1" * 5000 + "}", '<|channel|>analysis<|message|>{"score": 1}',
])  # fmt: skip
def test_what_is_no_single_object_is_refused_and_shown(text):
    with pytest.raises(ValueError, match="expected one JSON object; got") as told:
        json_object(text)
    assert len(str(told.value)) < 130
    with pytest.raises(ValueError, match="got 'It is red.'"):  # what came after the thought
        json_object("<think>" + text + "</think>\nIt is red.")


@pytest.mark.parametrize("mode, size, got, most", [
    ("RGB", (640, 480), (640, 480), MOST_PIXELS), ("RGBA", (32, 2048), (32, 2048), MOST_PIXELS),
    ("L", (4000, 2000), (2896, 1448), MOST_PIXELS), ("P", (300, 200), (150, 100), 15_000),
    ("1", (10, 8), (40, 32), MOST_PIXELS), ("LA", (1, 1), (32, 32), MOST_PIXELS),
    ("CMYK", (27, 60), (32, 71), MOST_PIXELS), ("L", (6000, 40), (6000, 40), MOST_PIXELS),
    ("L", (5000, 20), (6400, 32), MOST_PIXELS), ("L", (400, 100), (64, 32), 1 << 10),
])  # fmt: skip
def test_a_picture_of_any_mode_has_not_too_many_pixels_and_no_short_side(mode, size, got, most):
    """A judge is sent no less than the policy was shown, and at most --max-pixels of it."""
    kind, data = picture_part(Image.new(mode, size), most)["image_url"]["url"].split(",")
    picture = Image.open(io.BytesIO(base64.b64decode(data)))
    assert kind == "data:image/jpeg;base64" and picture.mode == "RGB" and picture.size == got


@pytest.mark.parametrize("silent, limits, step, said", [
    ((0, 1, 2, 3, 1, 3), {}, 5, "7 of the last 30 "),  # up to 6 of 30 in three steps are borne
    ((10,), {}, 0, "10 of the last 10 "),  # one that is silent from the start
    ((0, 0, 0, 7), {}, 3, "7 of the last 30 "),
    ((0, 0, 0, 6, 0, 0, 6), {}, None, ""),  # old steps are forgotten
    ((0, 0, 0, 0, 4, 1), dict(most=0.2, steps=2), 5, "5 of the last 20 "),
])  # fmt: skip
def test_a_rising_share_without_a_verdict_stops_the_run(silent, limits, step, said):
    """silent: how many of ten had no verdict in each step. The run stops in this one."""
    watch, judge = VerdictWatch(**limits), SimpleNamespace(last_problem="status 503")
    for now, missing in enumerate(silent):
        stops = pytest.raises(RuntimeError, match=f"{said}.*status 503.*resume")
        with stops if now == step else nullcontext():
            watch([None] * missing + [1.0] * (10 - missing), judge)
