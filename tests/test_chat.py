"""python -m pytest tests/test_chat.py      about 10 s: a server that fails in many ways"""

import base64
import io
import json
import math
import logging
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

from kit import chat
from kit.chat import Chat, VerdictWatch, json_object, picture_part, text_part

KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """Nobody sleeps: the seconds of each pause."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    return slept


def says(text, why="stop"):
    """The body of a chat completion."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": why}
    return json.dumps({"choices": [choice]}).encode()


def error(status, message, **headers):
    body = json.dumps({"error": {"message": message}}).encode()
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, body


class Server:
    """Plays its script, one entry a request, the last one for ever: a body, a (status, headers,
    body), or a function of the handler that does what it likes with the connection."""

    def __init__(self, *script):
        self.script, self.bodies, self.headers, self.paths = list(script), [], [], []
        self.now = self.most = 0
        self.lock, self.over = threading.Lock(), threading.Event()

    def handle(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.bodies.append(body)
            self.headers.append(handler.headers)
            self.paths.append(handler.path)
            self.now += 1
            self.most = max(self.most, self.now)
            play = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if callable(play):
            play = play(handler)
        if play is None:
            return
        status, headers, content = play if isinstance(play, tuple) else (200, {}, play)
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        with self.lock:
            self.now -= 1  # before the client can hear the end and ask again
        handler.wfile.write(content)


@contextmanager
def serving(*script):
    server = Server(*script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            try:
                server.handle(self)
            except (BrokenPipeError, ConnectionResetError):
                pass

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads, http.block_on_close = True, False
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    server.url = f"http://127.0.0.1:{http.server_port}/v1"
    yield server
    server.over.set()
    http.shutdown()
    http.server_close()


def ask(server, text="Which?", **changes):
    """(value, Chat) of one question."""
    it = Chat(server.url, "m", **changes)
    return it.ask("Be brief.", text, str.upper), it


# One question and its reply


@pytest.mark.parametrize("suffix", ["", "/", "/chat/completions", "/chat/completions/"])
def test_a_question_is_one_plain_request_and_its_value_is_what_the_reader_makes_of_it(suffix):
    with serving(says("yes")) as server:
        server.url += suffix
        assert ask(server)[0] == "YES"
    roles = {"system": "Be brief.", "user": "Which?"}
    messages = [{"role": role, "content": said} for role, said in roles.items()]
    whole = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 2048}
    assert server.bodies == [whole] and server.paths == ["/v1/chat/completions"]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_a_message_may_hold_pictures_in_their_order():
    parts = [text_part("first"), picture_part(Image.new("RGB", (40, 40), "red"))]
    with serving(says("ok")) as server:
        Chat(server.url, "m").ask("s", [*parts, text_part("last")], str)
    sent = server.bodies[0]["messages"][1]["content"]
    assert [part["type"] for part in sent] == ["text", "image_url", "text"] and sent[:2] == parts


@pytest.mark.parametrize(
    "url",
    ["h:8000/v1", "ftp://h/v1", "http://user:sk-key@h/v1", "http://h/v1?key=sk-key", "",
     "http://h/v1#sk-key", "http://h:port/v1", "http:///v1", "http://h /v1"],
)  # fmt: skip
def test_an_address_with_a_key_or_of_another_form_is_refused(url):
    with pytest.raises(ValueError, match="http://host:8000/v1.*JUDGE_API_KEY") as told:
        Chat(url, "m")
    assert "sk-key" not in str(told.value)


def test_text_that_utf8_cannot_write_is_asked_all_the_same():
    with serving(says("yes")) as server:
        assert ask(server, "printed: \ud800!")[0] == "YES"
    assert server.bodies[0]["messages"][1]["content"] == "printed: ?!"


def test_questions_in_turn_go_through_one_connection():
    ports = set()

    def answer(handler):
        ports.add(handler.client_address[1])
        return says("yes")

    with serving(answer) as server:
        it = Chat(server.url, "m")
        assert [it.ask("s", str(i), str) for i in range(3)] == ["yes"] * 3
    assert len(ports) == 1


# What may go wrong (each: bounded time, and None)


def hangs_up(handler):
    handler.close_connection = True
    handler.connection.close()


AGAIN = {
    "closes the socket": hangs_up,
    "server error": error(500, "oops"),
    "busy": error(429, "slow down"),
    "late": error(408, "too slow"),
}


@pytest.mark.parametrize("name", AGAIN)
def test_a_server_in_trouble_is_asked_again(name, pauses):
    with serving(AGAIN[name]) as server:
        got, it = ask(server, attempts=3)
    assert got is None and it.last_problem
    assert len(server.bodies) == 3 and len(pauses) == 2
    with serving(AGAIN[name], says("yes")) as server:
        assert ask(server)[0] == "YES"


@pytest.mark.parametrize(
    "body",
    [b"<html><body>502 Bad Gateway</body></html>", b"", b'{"choices": []}', b'{"choices": null}',
     b'{"choices": [5]}', b'{"error": "model is loading"}', b"[]", b"[" * 100_000, b"\xff\xfe{}"],
)  # fmt: skip
def test_what_is_no_chat_completion_is_named(body):
    with serving(body) as server:
        got, it = ask(server)
    assert got is None and "expected a chat completion, got b" in it.last_problem


TOO_LARGE = "max_tokens or max_completion_tokens is too large: 2048. The context has 1000."


@pytest.mark.parametrize(
    "status, said",
    [*((status, "this request holds 9 images") for status in (400, 402, 405, 413, 415, 422)),
     (400, "this model takes no images"), (400, "image not found"), (400, TOO_LARGE)],
)  # fmt: skip
def test_what_never_gets_better_is_asked_once(status, said, pauses):
    with serving(error(status, said)) as server:
        got, it = ask(server)
    assert got is None and len(server.bodies) == 1 and not pauses
    assert it.last_problem.startswith(f"status {status}: ") and said in it.last_problem


def test_a_server_that_is_not_there_is_asked_again(pauses):
    it = Chat("http://127.0.0.1:9/v1", "m")
    assert it.ask("s", "u", str) is None
    assert "ConnectError" in it.last_problem and len(pauses) == 3


def test_a_server_that_never_answers_is_given_up():
    with serving(lambda handler: server.over.wait(60) and None) as server:
        got, it = ask(server, seconds=0.05, attempts=2)
    assert got is None and "ReadTimeout" in it.last_problem and len(server.bodies) == 2


def test_pauses_grow_and_are_as_long_as_the_server_asks(pauses):
    busy, later = error(429, "busy"), error(429, "busy", Retry_After="100")
    with serving(busy, busy, later, busy) as server:
        assert ask(server, attempts=4)[0] is None
    assert 0 < pauses[0] < pauses[1] < pauses[2] == 100 and len(server.bodies) == 4


@pytest.mark.parametrize(
    "headers, least, most",
    [
        ({"Retry_After": "1.5"}, 1.5, 1.5),
        ({"retry_after_ms": "800"}, 0.8, 0.8),
        ({"Retry_After": "soon"}, 0.1, 60),
    ],
)
def test_a_server_may_ask_for_a_pause_in_every_form_of_the_header(pauses, headers, least, most):
    with serving(error(429, "busy", **headers), says("1")) as server:
        assert ask(server)[0] is not None
    assert least <= pauses[0] <= most


def test_a_server_may_ask_for_a_pause_until_a_date(pauses):
    date = formatdate(time.time() + 50, usegmt=True)  # in whole seconds
    with serving(error(429, "busy", Retry_After=date), says("1")) as server:
        assert ask(server)[0] is not None
    assert 8 < pauses[0] <= 50  # the first pause of the client's own is below one second


# A reply that is whole, but of no use


@pytest.mark.parametrize("body", [says("perhaps"), says(""), says(None), says("1", "length")])
def test_a_reply_of_no_use_is_not_asked_again(body):
    with serving(body) as server:
        it = Chat(server.url, "m")
        assert it.ask("s", "u", float) is None
    assert len(server.bodies) == 1 and it.last_problem


def test_a_cut_reply_is_named_as_cut_and_the_limit_can_be_set():
    with serving(says('<think>perhaps {"score": 1}', "length")) as server:
        got, it = ask(server, max_tokens=77)
    assert got is None and "cut at 77 tokens" in it.last_problem
    assert server.bodies[0]["max_tokens"] == 77


def test_an_error_of_the_reader_itself_is_not_hidden():
    with serving(says("yes")) as server, pytest.raises(KeyError):
        Chat(server.url, "m").ask("s", "u", lambda text: {}[text])


# Servers that refuse a parameter

NEWER = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."


@pytest.mark.parametrize(
    "refusals, left",
    [([NEWER], {"temperature": 0}),
     (["temperature does not support 0 with this model"], {"max_tokens": 2048}),
     (["These models don't support parameters: ['temperature']"], {"max_tokens": 2048}),
     (["Unrecognized argument: max_tokens; known: temperature"], {"temperature": 0}),
     ([NEWER, "Unsupported value: 'temperature'"], {})],
)  # fmt: skip
@pytest.mark.parametrize("status", [400, 422])
def test_a_refused_parameter_is_left_out_from_then_on(refusals, left, status, pauses):
    with serving(*(error(status, said) for said in refusals), says("yes")) as server:
        got, it = ask(server, attempts=1)
        assert got == "YES" and it.ask("s", "another", str.upper) == "YES"
    assert len(server.bodies) == len(refusals) + 2 and not pauses
    for body in server.bodies[-2:]:
        assert {k: v for k, v in body.items() if k not in ("model", "messages")} == left


def test_a_server_that_refuses_for_ever_is_not_asked_for_ever():
    with serving(error(400, "unsupported: temperature, max_tokens")) as server:
        assert ask(server)[0] is None
    assert len(server.bodies) == 3


# A wrong key, address or model


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_address_or_model_is_told_at_once_but_not_in_the_middle(status):
    with serving(error(status, "no")) as server:
        with pytest.raises(RuntimeError, match=f"{status}.*address.*name, m, .*JUDGE_API_KEY"):
            ask(server)
        assert len(server.bodies) == 1
    with serving(says("yes"), error(status, "no")) as server:
        got, it = ask(server)
        assert (got, it.ask("s", "another", str.upper)) == ("YES", None)
        assert len(server.bodies) == 2


def test_a_model_that_is_refused_with_status_400_is_told_at_once():
    with serving(error(400, "model judge-9 does not exist")) as server:
        with pytest.raises(RuntimeError, match="judge-9"):
            Chat(server.url, "judge-9").ask("s", "q", str)
        assert Chat(server.url, "other").ask("s", "q", str) is None


@pytest.mark.parametrize("status", [400, 401, 403, 404, 500])
def test_a_server_that_echoes_the_key_does_not_make_us_tell_it(status, caplog):
    caplog.set_level(logging.DEBUG)
    echo = error(status, "x" * 113 + f" api key {KEY}")  # what is shown ends amid the key
    told = ""
    with serving(echo) as server:
        it = Chat(server.url, "m", attempts=1)
        try:
            assert it.ask("s", "u", str) is None
        except RuntimeError:
            told = traceback.format_exc()
    for text in (told, caplog.text, repr(it), it.last_problem, json.dumps(server.bodies)):
        assert "sk-" not in text
    assert it.last_problem and server.headers[0]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_refuses_a_key_may_quote_a_part_of_it(status):
    with serving(says("yes"), error(status, "Incorrect API key provided: sk-very*****")) as server:
        _, it = ask(server)
        assert it.ask("s", "another", str) is None
    assert it.last_problem == f"status {status}: ''"


def test_a_key_is_stripped_and_an_odd_one_refused_unseen(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", f" {KEY}\n")
    with serving(says("yes")) as server:
        assert ask(server)[0] == "YES"
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    for odd in ("sk-a\nb", "sk-a b", "sk-…"):
        monkeypatch.setenv("JUDGE_API_KEY", odd)
        with pytest.raises(ValueError, match="JUDGE_API_KEY") as told:
            Chat("http://h/v1", "m")
        assert "sk-" not in str(told.value)


def test_what_belongs_to_another_server_is_not_sent(monkeypatch):
    monkeypatch.delenv("JUDGE_API_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    with serving(says("yes")) as server:
        assert ask(server)[0] == "YES"
    assert "sk-of-another" not in str(server.headers[0])


def test_proxies_of_the_environment_are_used_and_exceptions_from_them(monkeypatch):
    with serving(says("by proxy")) as proxy, serving(says("direct")) as server:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        assert ask(server)[0] == "BY PROXY" and proxy.paths == [f"{server.url}/chat/completions"]
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert ask(server)[0] == "DIRECT"


# The cache


def test_a_second_run_asks_nothing_and_the_folder_holds_no_key(tmp_path):
    cache = tmp_path / "new" / "folder"
    with serving(says("yes")) as server:
        _, it = ask(server, cache=cache)
        assert it.ask("Be brief.", "Which?", str.upper) == "YES"  # nor does the first
        assert ask(server, cache=cache, max_tokens=9)[0] == "YES"
        assert len(server.bodies) == 1
        ask(server, "Another?", cache=cache)
        it.ask("Be long.", "Which?", str.upper)
        Chat(server.url, "n", cache=cache).ask("Be brief.", "Which?", str.upper)
        assert len(server.bodies) == 4  # another text, prompt or model is another question
    (path,) = cache.iterdir()
    assert path.read_text().count("YES") == 4 and KEY not in path.read_text()


@pytest.mark.parametrize("kept", [True, False])
def test_a_value_is_what_json_gives_back_the_first_time_too(tmp_path, kept):
    with serving(says("yes")) as server:
        it = Chat(server.url, "m", cache=tmp_path if kept else None)
        for _ in range(2):
            it = Chat(server.url, "m", cache=tmp_path) if kept else it
            read = lambda text: (0.5, text, None, False)  # noqa: E731
            assert it.ask("s", "u", read) == [0.5, "yes", None, False]
        assert it.ask("s", "v", lambda text: 0) == 0  # a value, though it counts as false
        assert it.ask("s", "v", lambda text: 1) == 0
    assert len(server.bodies) == 2


def test_failures_are_not_kept(tmp_path):
    with serving(says("perhaps"), error(503, "busy"), says("1")) as server:
        for value in (None, None, 1.0):
            it = Chat(server.url, "m", cache=tmp_path, attempts=1)
            assert it.ask("s", "u", float) == value
    assert len(list(tmp_path.iterdir())) == 1


def test_a_line_that_a_kill_cut_is_asked_again_and_spoils_no_other(tmp_path):
    with serving(says("yes")) as server:
        ask(server, cache=tmp_path)
        (path,) = tmp_path.iterdir()
        path.write_bytes(path.read_bytes()[:-9])
        for _ in range(2):
            assert ask(server, cache=tmp_path)[0] == "YES"
        assert len(server.bodies) == 2


@pytest.mark.parametrize(
    "line",
    [b'{"key": "x"}', b"5", b"[]", b'{"key": [], "value": 1}', b"\xff", b"[" * 100_000,
     b'{"key": "x", "verdict": [1.0, "of an older version"]}'],
)  # fmt: skip
def test_an_odd_line_in_the_folder_is_skipped(line, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line + b'\n{"key": "y", "value": [1.0, "r"]}\n')
    assert Chat("http://host/v1", "m", cache=tmp_path).known == {"y": [1.0, "r"]}


def test_processes_share_a_folder_and_each_writes_its_own_file(tmp_path, monkeypatch):
    with serving(says("yes")) as server:
        for pid in (11, 12):
            monkeypatch.setattr(chat.os, "getpid", lambda pid=pid: pid)
            ask(server, f"by {pid}", cache=tmp_path)
        names = [path.name.split("-")[-1] for path in sorted(tmp_path.iterdir())]
        assert names == ["11.jsonl", "12.jsonl"]
        it = Chat(server.url, "m", cache=tmp_path)
        assert it.ask("Be brief.", "by 11", str) == it.ask("Be brief.", "by 12", str) == "YES"
        assert len(server.bodies) == 2


# Threads


def test_requests_in_flight_never_exceed_the_limit_and_reach_it(tmp_path):
    both = threading.Barrier(2)

    def answer(handler):
        both.wait(30)  # goes on only if two are here at the same time
        server.over.wait(0.05)  # a third would come now
        return says("yes")

    with serving(answer) as server:
        it = Chat(server.url, "m", cache=tmp_path, concurrency=2)
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda i: it.ask("s", f"question {i}", str), range(12)))
        assert got == ["yes"] * 12 and server.most == 2 and len(server.bodies) == 12
    assert len(Chat("http://h/v1", "m", cache=tmp_path).known) == 12


def test_a_question_in_work_is_not_asked_twice():
    """Eight threads, one question: one request, and one value for all; a failure is for all, too,
    and is asked again later."""

    def late(handler):
        server.over.wait(0.3)
        return says("yes")

    refusal = error(422, "no")
    with serving(late, lambda handler: server.over.wait(0.3) or refusal, says("later")) as server:
        it = Chat(server.url, "m")
        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(lambda _: it.ask("s", "u", str), range(8))] == ["yes"] * 8
            assert [*pool.map(lambda _: it.ask("s", "v", str), range(8))] == [None] * 8
        assert len(server.bodies) == 2 and it.ask("s", "v", str) == "later" and not it.asking


def test_several_servers_take_turns_and_one_that_is_down_leaves_it_to_the_next():
    with serving(says("a")) as one, serving(says("b")) as two:
        it = Chat(f"{one.url}, {two.url}/chat/completions", "m", attempts=1)
        assert [it.ask("s", f"question {i}", str) for i in range(4)] == ["a", "b", "a", "b"]
        it = Chat(f"http://127.0.0.1:9/v1,{two.url}", "m", attempts=1)
        assert [it.ask("s", f"question {i}", str) for i in range(3)] == ["b"] * 3
    with pytest.raises(ValueError, match="address should look like"):
        Chat(f"{one.url},nowhere", "m")


def test_what_is_known_does_not_wait_for_what_is_asked():
    def late(handler):
        server.over.wait(60)
        return says("late")

    with serving(says("yes"), late) as server:
        _, it = ask(server, concurrency=1, attempts=1)
        thread = threading.Thread(target=it.ask, args=("s", "slow", str))
        thread.start()
        while len(server.bodies) < 2:  # the only seat is taken
            pass
        assert it.ask("Be brief.", "Which?", str.upper) == "YES"
        server.over.set()
        thread.join()


# Reading a reply


@pytest.mark.parametrize(
    "text",
    ['{"score": 0}', ' {"score": 0}\n', '```json\n{"score": 0}\n```', '```\n{ "score": 0 }\n```',
     'The score: {"score": 0}', 'So {"score": 0}, or again: {"score": 0}', '{\n"score": 0}. Done.',
     '<think>perhaps {"score": 1}?</think>\n{"score": 0}',
     'perhaps {"score": 1}</think>{"score": 0}',
     '<think>a</think><think>{"score": 1}</think>{"score": 0}',
     '<THINKING>1</THINKING>{"score": 0}',
     '[THINK]{"score": 1}[/THINK]{"score": 0}', '◁think▷{"score": 1}◁/think▷{"score": 0}',
     r'As \frac{1}{2} = {0.5}, the score is {"score": 0}'],
)  # fmt: skip
def test_the_object_after_any_thought_is_found(text):
    assert json_object(text) == {"score": 0}


def test_an_object_is_given_whole():
    value = {"reason": 'a "{" and }', "score": 0.5, "more": {"a": [1, None, {"b": True}]}}
    assert json_object(json.dumps(value, indent=1)) == value
    assert json_object('{"reason": "a\nb", "score": 1}') == {"reason": "a\nb", "score": 1}


@pytest.mark.parametrize(
    "text",
    ["", "10", "not correct", "NaN", '[["score", 1]]', "{}", "{'score': 1}", '{"score": 1',
     '{"score": 1, "score": 1}', '{"score": 0} {"score": 1}', '{"score": 1} {"score": true}',
     '{"score": 1} {"score": 1.0}', '{"more": {"score": 1}, "score": 0', '{"a": {"score": 1},}',
     '{"a": {"score": 0, "score": 1}}', '<think>perhaps {"score": 1}', '{"a":' * 5000,
     '<think>a</think>{"score": 0}</think>', '<think>{"score": 0}</think>', "[" * 5000,
     '{"score": ' + "1" * 5000 + "}"],
)  # fmt: skip
def test_what_is_no_single_object_is_refused_and_shown(text):
    with pytest.raises(ValueError, match="expected one JSON object; got") as told:
        json_object(text)
    assert len(str(told.value)) < 130


def test_a_refusal_shows_what_came_after_the_thought():
    with pytest.raises(ValueError, match="got 'It is red.'"):
        json_object("<think>" + "hm " * 100 + "</think>\nIt is red.")


# Pictures


def sent(image, *most):
    url = picture_part(image, *most)["image_url"]["url"]
    kind, data = url.split(",")
    assert kind == "data:image/jpeg;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


@pytest.mark.parametrize(
    "size, most, got",
    [((640, 480), 1 << 22, (640, 480)), ((32, 2048), 1 << 22, (32, 2048)),
     ((5000, 2500), 1 << 22, (2896, 1448)), ((300, 200), 15_000, (150, 100)),
     ((10, 8), 1 << 22, (40, 32)), ((1, 1), 1 << 22, (32, 32)), ((27, 60), 1 << 22, (32, 71)),
     ((6000, 40), 1 << 22, (6000, 40)), ((5000, 20), 1 << 22, (6400, 32)),
     ((1, 400), 1 << 22, (32, 6400)), ((400, 100), 1 << 10, (64, 32))],
)  # fmt: skip
def test_a_picture_has_not_too_many_pixels_and_no_short_side(size, most, got):
    assert sent(Image.new("RGB", size), most).size == got


@pytest.mark.parametrize("size", [(10, 8), (27, 60), (4000, 800), (9000, 300), (5000, 2500)])
def test_a_judge_is_sent_no_less_than_the_policy_was_shown(size):
    """A policy is shown no side below 28 pixels, and at most --max-pixels of them."""
    w, h = sent(Image.new("RGB", size)).size
    assert min(w, h) >= 28 and w * h >= min(math.prod(size), 3_211_264)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "LA", "CMYK"])
def test_a_picture_of_any_mode_is_sent(mode):
    assert sent(Image.new(mode, (50, 40))).size == (50, 40)


def test_a_picture_keeps_its_colours():
    gradient = Image.linear_gradient("L").convert("RGB")  # 256 x 256: a row has one grey
    for y in (5, 128, 250):
        assert sent(gradient).getpixel((9, y)) == pytest.approx((y, y, y), abs=3)


# The price of the client


def test_only_those_who_ask_a_server_load_the_client():
    code = "import sys, kit.chat; print('openai' in sys.modules, 'httpx2' in sys.modules)"
    how = {"capture_output": True, "text": True, "cwd": chat.__file__[:-12]}
    run = subprocess.run([sys.executable, "-c", code], **how)
    assert run.stdout.split() == ["False", "False"], run.stderr


# All tries together


def test_a_reply_that_drips_for_ever_ends_with_our_patience():
    over = threading.Event()

    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        while not over.wait(0.02):  # each byte comes sooner than `seconds`
            handler.wfile.write(b" ")
            handler.wfile.flush()

    with serving(drip) as server:
        judge = Chat(server.url, "m", attempts=1, seconds=5, patience=0.3)
        try:
            assert judge.ask("s", "q", str) is None
            assert "no whole answer within 0.3 s" in judge.last_problem
        finally:
            over.set()


# A judge that falls silent


def heard(silent, of):
    return [None] * silent + [1.0] * (of - silent)


def test_a_rising_share_without_a_verdict_stops_the_run():
    watch = VerdictWatch(most=0.2, steps=3)
    for silent in (0, 1, 2, 3, 1):  # at most 6 of 30
        watch(heard(silent, 10))
    judge = Chat("http://h/v1", "m")
    judge.last_problem = "status 503"
    with pytest.raises(RuntimeError, match="7 of the last 30 .*status 503.*resume"):
        watch(heard(3, 10), judge)


def test_a_judge_that_is_silent_from_the_start_stops_the_first_step():
    with pytest.raises(RuntimeError, match="10 of the last 10"):
        VerdictWatch()(heard(10, 10))


def test_a_run_looks_back_three_steps_and_bears_a_fifth():
    for silent in (6, 7):
        watch = VerdictWatch()
        for _ in range(3):
            watch(heard(0, 10))
        with (
            nullcontext() if silent == 6 else pytest.raises(RuntimeError, match="7 of the last 30")
        ):
            watch(heard(silent, 10))


def test_old_steps_are_forgotten():
    watch = VerdictWatch(most=0.2, steps=2)
    for silent in (0, 0, 0, 0, 4):
        watch(heard(silent, 10))
    with pytest.raises(RuntimeError, match="5 of the last 20"):
        watch(heard(1, 10))
