"""Templates in their process: what they may do, the caps, and that the next call is served after each."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from ingot.ir.errors import ArtifactError, InternalError, RequestError
from ingot.runtime.chat.renderer import Renderer

LONG = 60.0  # where no cap on time is tested: a busy machine may take its time


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    made = Renderer(seconds=LONG, characters=100_000)
    yield made
    made.close()


def render(renderer: Renderer, template: str, **context: object) -> str:
    (text,) = renderer.render("the-template", template, [context])
    return text


def still_serves(renderer: Renderer) -> bool:
    renderer.seconds = LONG
    return render(renderer, "{{ x }}", x="é🙂\ud800\n") == "é🙂\ud800\n"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),  # trim_blocks, lstrip_blocks
        ("{% for i in [0, 1, 2] %}{% if i == 0 %}{% continue %}{% endif %}{{ i }}{% break %}{% endfor %}", "1"),
        ("{{ x | tojson }}", '{"b": "é<&\'", "a": [1, null]}'),  # no escapes for HTML or ASCII, keys in order
        ("{{ x | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  1,\n  null\n ],\n "b": "é<&\'"\n}'),
        ("{{ x | tojson(ensure_ascii=true, separators=(',', ':')) }}", '{"b":"\\u00e9<&\'","a":[1,null]}'),
        ("{% generation %}{% set y = 1 %}<{{ x.b }}>{% endgeneration %}{{ y }}", "<é<&'>"),
        ("{% set ns = namespace(n=0) %}{% for i in x.a %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{{ dict(a=1) }}{{ dict.fromkeys('ab') }}", "{'a': 1}{'a': None, 'b': None}"),
        ("{{ missing }}{{ x.missing }}", ""),
    ],
)  # fmt: skip
def test_what_templates_rely_on(renderer: Renderer, template: str, text: str) -> None:
    assert render(renderer, template, x={"b": "é<&'", "a": [1, None]}) == text


def test_the_time_is_one_for_all_contexts(renderer: Renderer) -> None:
    texts = renderer.render("the-template", "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}", [{}] * 50)
    assert len(set(texts)) == 1 and texts[0].startswith(time.strftime("%Y-"))


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", [ENDLESS, "{% set x = 9 ** (9 ** y) %}"])
def test_an_endless_template_is_stopped(renderer: Renderer, template: str) -> None:
    assert still_serves(renderer)  # so that starting does not count
    renderer.seconds = 0.3
    begin = time.monotonic()
    with pytest.raises(RequestError, match=r"longer than 0\.3 s[\s\S]*the-template[\s\S]*cap on time"):
        render(renderer, template, y=9)
    assert time.monotonic() - begin < LONG / 2
    assert still_serves(renderer)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ ('a' * 10 ** 10) | length }}", "more memory"),
        ("{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", "more memory"),
        ("{{ '%09999999999d' % 1 }}", "cap on memory|failed"),
        ("{% for i in range(99999) %}{{ 'abc' * 9 }}{% endfor %}", "more than 100000 characters"),
        ("{{ 'a' * 100001 }}", "more than 100000 characters[\\s\\S]*cap on size"),
        ("{% for i in range(10 ** 12) %}{% endfor %}", "MAX_RANGE"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ ('' | attr('__class__')).x }}", "SecurityError"),
        ("{{ lipsum.__globals__['os'].system('true') }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__ }}", "SecurityError"),
        ("{{ raise_exception.__globals__['json'] }}", "SecurityError"),
        ("{{ '{0.__class__.__mro__}'.format(x) }}", "SecurityError"),
        ("{% set ns = namespace() %}{% set ns.__class__ = x %}", "SecurityError"),
        ("{{ namespace(_a=1) }}", "SecurityError"),
        ("{{ x.append(1) }}", "SecurityError"),
        ("{% include '/etc/hostname' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
        ("{% extends 'x' %}", "no loader"),
        ("{{ raise_exception('turns must alternate') }}", "refuses the conversation: turns must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)  # fmt: skip
def test_what_a_template_may_not_do(renderer: Renderer, template: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        render(renderer, template, x=[])
    assert caught.value.where == "the-template"
    assert still_serves(renderer)


@pytest.mark.parametrize("template", ["{% if %}", "{{ x | no_such_filter }}", "{% nonsense %}", "{{"])
def test_what_is_no_template_is_the_artifacts_fault(renderer: Renderer, template: str) -> None:
    with pytest.raises(ArtifactError, match="no valid template: line 1"):
        render(renderer, template)
    assert still_serves(renderer)


def test_a_text_at_the_cap_passes(renderer: Renderer) -> None:
    assert len(render(renderer, "{{ 'a' * 100000 }}")) == 100_000


def test_a_worker_that_dies_is_replaced(renderer: Renderer) -> None:
    assert still_serves(renderer)
    before = renderer._worker
    assert before is not None
    before._process.kill()
    with pytest.raises(RequestError, match="ended its process with status -9"):
        render(renderer, "x")
    assert still_serves(renderer) and renderer._worker is not before


def test_a_worker_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InternalError, match="did not start, status 1"):
        render(Renderer(), "x")


def test_threads_take_turns(renderer: Renderer) -> None:
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        texts[number] = render(renderer, "{{ x }}", x=number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: str(number) for number in range(16)}


PARENT = """
import sys
from ingot.runtime.chat.renderer import Renderer
renderer = Renderer()
renderer.render("t", "x", [{}])
print(renderer._worker._process.pid, flush=True)
sys.stdin.read()
"""


def ends(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_the_worker_does_not_outlive_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert ends(pid, seconds=20)


def test_the_worker_has_limits_of_its_own(renderer: Renderer) -> None:
    assert still_serves(renderer) and renderer._worker is not None
    pid = renderer._worker._process.pid
    assert resource.prlimit(pid, resource.RLIMIT_AS)[0] == 512 << 20
    renderer.seconds = 7.0
    assert render(renderer, "x") == "x"
    assert 8 <= resource.prlimit(pid, resource.RLIMIT_CPU)[0] <= 7 + LONG  # from the time used so far


@pytest.mark.slow
def test_cpu_time_bounds_a_worker_without_a_parent() -> None:
    """The parent's clock is not the only one: the process has a limit of its own."""
    command = [sys.executable, "-m", "ingot.runtime.chat.worker"]
    request = {"template": ENDLESS, "contexts": [{}], "seconds": 0.1, "characters": 9}
    done = subprocess.run(command, input=json.dumps(request) + "\n", capture_output=True, text=True, timeout=LONG)
    assert (done.returncode, done.stdout) == (-signal.SIGXCPU, '{"ready": true}\n')


def test_a_renderer_that_is_dropped_ends_its_worker() -> None:
    made = Renderer(seconds=LONG)
    assert still_serves(made)
    assert made._worker is not None
    pid = made._worker._process.pid
    del made
    assert ends(pid, seconds=20)


IMPORTS = (
    "import sys, ingot.runtime.chat.worker; print(*{'torch', 'numpy', 'tokenizers', 'pydantic'} & sys.modules.keys())"
)


def test_the_worker_imports_little() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "\n"
