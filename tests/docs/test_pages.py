"""The pages of docs/: their commands run, what they show is what comes out, and their links lead somewhere."""

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from drawn import drawn

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def tools() -> Iterator[None]:
    """The modules of docs/tools, importable, and those of benchmarks/, which they read results with."""
    folders = (DOCS / "tools", ROOT / "benchmarks", ROOT / "benchmarks" / "kernels")
    with pytest.MonkeyPatch.context() as patch:
        for folder in folders:
            patch.syspath_prepend(folder)
        yield
    for folder in folders:
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def run(tools: None) -> Iterator[object]:
    import generate

    with generate.shell() as run:
        yield run


def check(path: str, found: str) -> None:
    """Fail, with the first line that differs, unless docs/PATH is `found`."""
    committed = (DOCS / path).read_text(encoding="utf-8")
    if found == committed:
        return
    pairs = itertools.zip_longest(found.splitlines(True), committed.splitlines(True), fillvalue="(the end)\n")
    number, (new, old) = next((number, pair) for number, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    pytest.fail(
        f"docs/{path} is out of date: run `make docs`, review the difference, and commit it\n"
        f"line {number} now       {new}line {number} committed {old}",
        pytrace=False,
    )


def test_the_reference_is_of_now(tools: None) -> None:
    import tables

    check("reference.md", tables.reference())


def test_the_benchmarks_are_of_now(tools: None) -> None:
    import benchmark_page

    text, plots = benchmark_page.benchmark_page()
    check("benchmarks.md", text)
    for path, plot in plots.items():
        check(path, plot)
    assert {f"benchmarks/{path.name}" for path in DOCS.glob("benchmarks/*")} == plots.keys()


def test_a_gpu_is_shown_with_its_peers_and_what_is_missing(tools: None) -> None:
    import benchmark_page
    from results import Figure, Machine, Result

    def figure(value: float, unit: str = "s") -> Figure:
        return Figure(value=value, unit=unit, what="words")

    figures = {
        "copy": figure(4e12, "B/s"),
        "batch_32_step": figure(1e-3),
        "batch_4_step": figure(5e-4),
        "vllm_1.0_batch_32_step": figure(1.5e-3),
        "vllm_2.0_batch_32_step": figure(1.6e-3),
        "batch_32_weights": figure(2.4e9, "B"),
        "batch_32_cache": figure(0.6e9, "B"),
        "batch_32_bandwidth": figure(3e12, "B/s"),
        "batch_32_of_copy": figure(0.75, ""),
        "throughput": figure(30e3, "tokens/s"),
        "vllm_1.0_throughput": figure(19e3, "tokens/s"),
        "vllm_2.0_throughput": figure(20e3, "tokens/s"),
        "sglang_3.1_throughput": figure(15e3, "tokens/s"),
        "sglang_3.1_batch_4_step": figure(1e-3),
        "compile": figure(20.0),
        "vllm_1.0_cold_first_token": figure(80.0),
        "start_memory": figure(3e9, "B"),
    }
    machine = Machine(processor="P", features=(), cores=16, memory=1 << 30, system="S", load=0.0, gpu="G", driver="580")
    found = Result(
        name="gpu_1b",
        script="gpu.py",
        revision="0" * 40 + "+",
        date="2026-01-02",
        machine=machine,
        versions={"torch": "9.0"},
        settings={"shape": "1b"},
        figures=figures,
        missing={"cold_start": "it ended with status 1: out of memory", "sglang": "it was ended after 300 s"},
    )
    text, plots = benchmark_page.page([found])
    assert "## Engines on G\n" in text and "G, driver 580; P, 16 cores" in text and "commit 000000000000+" in text
    assert "| model | engine | 4 sequences | 32 sequences |" in text
    assert "| Llama 3.2 1B | Ingot | 500 µs | 1.00 ms |" in text
    assert "| Llama 3.2 1B | vLLM 1.0 | – | 1.50 ms, 1.50 × |" in text
    assert "| Llama 3.2 1B | vLLM 2.0 | – | 1.60 ms, 1.60 × |" in text
    assert "| Llama 3.2 1B | SGLang 3.1 | 1.00 ms, 2.00 × | – |" in text
    assert "| Llama 3.2 1B | Ingot | 30,000 tokens/s |" in text
    assert "| Llama 3.2 1B | vLLM 2.0 | 20,000 tokens/s, 1.50 × |" in text
    assert "| Llama 3.2 1B | vLLM 1.0, first start | 80.0 s |" in text
    assert "| words | 20.0 s |" in text
    assert "| start to the first token | 3.00 GB |" in text and "compile-model, anonymous" not in text
    assert "| Llama 3.2 1B | 32 | 2.40 GB | 600 MB | 3.00 TB/s | 75.0% |" in text
    assert "Not measured: cold start. it ended with status 1: out of memory" in text
    assert "; sglang 3.1, torch 9.0, vllm 1.0, vllm 2.0." in text
    assert "Not measured: SGLang. it was ended after 300 s" in text
    assert "compiler processes of it" not in text, "it is said of a compile whose memory was measured"
    compiled = {**figures, "compile_memory": figure(4e9, "B")}
    for options, jobs in {"": 16, "--max-batch 4 -j 10": 10, "--jobs=3": 3}.items():
        settings = {"shape": "1b", "compile": options, "load": ""}
        text = benchmark_page.page([found.model_copy(update={"figures": compiled, "settings": settings})])[0]
        assert f"| compiler processes of it, at most (`-j`) | {jobs} |" in text
    few, many = plots.values()
    assert [*plots] == ["benchmarks/decode_g_4.svg", "benchmarks/decode_g_32.svg"]
    assert all(f">{label}<" in few for label in ("Ingot", "SGLang", "500 µs"))
    assert all(f">{label}<" in many for label in ("Ingot", "vLLM", "750 µs", "1.50 ms"))  # 750: a copy of 3 GB
    asked = {"compile": "--max-batch 4", "load": "", "shape": "1b"}
    text, _ = benchmark_page.page([found.model_copy(update={"name": "gpu_1b_load", "settings": asked})])
    command = '`python benchmarks/gpu.py --shape 1b --options "--max-batch 4" --name gpu_1b_load`'
    assert f"- Llama 3.2 1B (load): {command}. 2026-01-02" in text


def test_servers_are_shown_with_what_http_adds(tools: None) -> None:
    import benchmark_page
    from results import Figure, Machine, Result

    def figure(value: float, unit: str = "s") -> Figure:
        return Figure(value=value, unit=unit, what="words")

    waits = {"ttft": 9e-3, "ttft_p50": 8e-3, "ttft_p99": 2e-2, "tpot_p50": 2e-3, "tpot_p99": 3e-3}
    figures = {
        "start": figure(5.0),
        "vllm_1.0_start": figure(50.0),
        "knee": figure(150.0, "requests/s"),
        "knee_failed": figure(156.0, "requests/s"),
        "vllm_1.0_knee": figure(100.0, "requests/s"),
        "throughput": figure(50e3, "tokens/s"),
        "vllm_1.0_throughput": figure(40e3, "tokens/s"),
        **{f"arrivals_16_{name}": figure(value) for name, value in waits.items()},
        **{f"direct_arrivals_16_{name}": figure(value / 2) for name, value in waits.items()},
        **{f"vllm_1.0_arrivals_16_{name}": figure(3 * value) for name, value in waits.items()},
        **{f"added_16_{name}": figure(1e-3) for name in ("ttft_p50", "ttft_p99")},
        **{f"ratio_16_{name}": figure(1.05, "") for name in ("tpot_p50", "tpot_p99")},
        "good_16": figure(0.995, ""),
        "vllm_1.0_good_16": figure(0.9, ""),
    }
    machine = Machine(processor="P", features=(), cores=16, memory=1 << 30, system="S", load=0.0, gpu="G", driver="580")
    found = Result(
        name="serve_http_1b",
        script="serve_http.py",
        revision="0" * 40,
        date="2026-01-02",
        machine=machine,
        versions={},
        settings={"shape": "1b", "limits": "100,5"},
        figures=figures,
        missing={"sglang": "no time was left"},
    )
    text, _ = benchmark_page.page([found])
    assert "## Servers over HTTP on G\n" in text and "Not measured: SGLang. no time was left" in text
    knee = "| Llama 3.2 1B | 100 ms, 5 ms a token | {} |"
    assert knee.format("Ingot | 150 requests/s | 156 requests/s") in text
    assert knee.format("vLLM 1.0 | 100 requests/s, 1.50 × | –") in text
    assert "| Llama 3.2 1B | vLLM 1.0 | 40,000 tokens/s, 1.25 × | 50.0 s, 10.0 × |" in text
    assert "| Llama 3.2 1B | 16 | first token, p99 | 10.0 ms | 20.0 ms | 1.00 ms |" in text
    assert "| Llama 3.2 1B | 16 | later tokens, p50 | 1.00 ms | 2.00 ms | 1.05 × |" in text
    times = "24.0 ms, 3.00 × | 60.0 ms, 3.00 × | 6.00 ms, 3.00 × | 9.00 ms, 3.00 ×"
    assert f"| Llama 3.2 1B | 16 | vLLM 1.0 | {times} | 90.0% |" in text
    assert "## Measure" not in text  # the plain table of a script


def test_kernels_are_shown_with_their_shares_and_peers(tools: None) -> None:
    import benchmark_page
    from kernel_figures import Call, Peak, call_figures
    from results import Machine, Result

    peak = Peak(copy=4e12, rate=8e14)
    figures = Peak(copy=4e12).figures("attention") | peak.figures("linear")
    read, product = Call("8_x_16k", "8 x 16k", 4 * 10**8), Call("qkv_512_tokens", "qkv, 512 tokens", 10**6, 8 * 10**10)
    alone = Call("1_x_2k", "1 x 2k", 8 * 10**6)
    both = {"triton": [2e-4], "flashinfer": [3e-4]}
    figures |= call_figures("attention", read, both, peak, ours="triton", peer="flashinfer")
    figures |= call_figures("attention", alone, {"triton": [4e-6]}, peak, ours="triton", peer="flashinfer")
    figures |= call_figures("linear", product, {"cublas": [2e-4]}, peak)
    figures |= peak.figures("step")
    for rows, took in (("1 row", 3e-6), ("32 rows", 2e-5)):
        call = Call(f"sample_{rows[:2].strip()}", f"sample, greedy, {rows}", 10**4 if rows == "1 row" else 4 * 10**7)
        figures |= call_figures("step", call, {"triton": [took]}, peak)
    machine = Machine(processor="P", features=(), cores=16, memory=1 << 30, system="S", load=0.0, gpu="G", driver="580")
    found = Result(
        name="kernels_8b",
        script="gpu_kernels.py",
        revision="0" * 40,
        date="2026-01-02",
        machine=machine,
        versions={},
        settings={"shape": "8b"},
        figures=figures,
        missing={"linear.o_8_tokens": "the result is wrong by 0.5"},
    )
    text, plots = benchmark_page.page([found])
    assert "## Kernels of Llama 3.1 8B on G\n" in text and "G, driver 580; P, 16 cores" in text
    assert "|  | bytes | Ingot, Triton | FlashInfer | Ingot, Triton, faster than FlashInfer by |" in text
    shares = "200 µs, 50.0% of the copy | 300 µs, 33.3% of the copy | 1.50 ×"
    assert f"| 8 x 16k | 400 MB | {shares} |" in text
    assert "| 1 x 2k | 8.00 MB | 4.00 µs, 50.0% of the copy | – | – |" in text
    assert "| qkv, 512 tokens | 1.00 MB | 80.0 Gflop | 200 µs, 50.0% of the rate |" in text
    assert "The copy reads and writes 4.00 TB/s.\n" in text
    assert "The copy reads and writes 4.00 TB/s; the large matmul reaches 800 Tflop/s." in text
    assert "Not measured: linear.o 8 tokens. the result is wrong by 0.5" in text
    assert "|  | 1 row | 32 rows |" in text and "| sample, greedy | 3.00 µs | 20.0 µs, 50.0% of the copy |" in text
    assert "### Attention of prefill steps" not in text and plots.keys() == {"benchmarks/kernels_8b_attention.svg"}
    (plot,) = plots.values()
    assert all(f">{label}<" in plot for label in ("8 x 16k", "FlashInfer", "300 µs", "a copy of its bytes", "100 µs"))


# One group: the pages share the process that runs their commands.
@pytest.mark.xdist_group("docs")
@pytest.mark.parametrize(
    "page", drawn(1, ["life-of-a-token", "write-a-pass", "add-an-op", "add-a-backend", "add-a-model"])
)
def test_a_page_shows_what_happens(page: str, run: object) -> None:
    import generate

    check(f"{page}.md", generate.filled(page, run))


@pytest.mark.xdist_group("docs")
def test_commands_of_pages_write_no_bytecode(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A page's folder links to the checkout, so that bytecode would go there with paths of a folder that is gone."""
    (tmp_path / "imported.py").write_text("")
    (tmp_path / "script.py").write_text("import imported")
    (tmp_path / "test_one.py").write_text("def test_one() -> None: ...")
    for argv in (["script.py"], ["-m", "pytest", "-q", "test_one.py"]):
        status, printed = run(["python", *argv], tmp_path, [], True)
        assert status == 0, printed
    assert not [*tmp_path.rglob("__pycache__")]


def test_the_readme_counts_the_families() -> None:
    from ingot.models.architectures import ARCHITECTURES

    found = re.search(r"decoders of (\d+) families", (ROOT / "README.md").read_text(encoding="utf-8"))
    families = {architecture.family for architecture in ARCHITECTURES.values()}
    assert found and int(found[1]) == len(families), "change the number, and name the new family, in README.md"


def test_every_page_is_run(tools: None) -> None:
    import generate

    assert {path.stem for path in DOCS.glob("*.md")} == {*generate.PAGES, *generate.BUILT, "reference", "benchmarks"}


def test_one_page_leads_to_those_of_each_subject(tools: None) -> None:
    import generate

    first, *others = generate.BUILT
    linked = re.findall(r"^- \[.*?\]\(([\w-]+)\.md\)", (DOCS / f"{first}.md").read_text(encoding="utf-8"), re.M)
    assert linked == others


@pytest.mark.parametrize("page", sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]), ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}, which is not there"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name} links to {target}, and {linked.name} has no such heading"


@pytest.mark.parametrize("page", ["architecture", "glossary", "gpu-kernels", "artifact", "serving", "looking-in"])
def test_named_files_are_there(page: str) -> None:
    """`*` and `NAME` stand for any text."""
    rooms = "ir|models|frontend|passes|backends|runtime|ingot|benchmarks|tests|docs"
    named = re.findall(rf"`((?:{rooms})/[\w./*]*)`", (DOCS / f"{page}.md").read_text(encoding="utf-8"))
    assert named or page != "architecture"
    missing = [path for path in named if not list(ROOT.glob(path.replace("NAME", "*")))]
    assert not missing, f"{page}.md names files that are not there: {missing}"


def page_text(*blocks: str) -> str:
    return "\n\n".join(blocks) + "\n"


@pytest.fixture
def walk(tools: None, tmp_path: Path):  # type: ignore[no-untyped-def]  # a class of a module on no one's path
    """A walk over a root of one file, whose only command prints its arguments and ends with their number."""
    import pages

    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "code.py").write_text("a = 1\ndef f():\n    b = 2\n    return b\nc = 3\n")
    (tmp_path / "walk").mkdir()

    def echo(argv: list[str], folder: Path, path: list[str], stderr: bool) -> tuple[int, str]:
        return len(argv) - 1, "".join(f"{one}\n" for one in argv)

    return pages.Walk(tmp_path / "root", tmp_path / "walk", echo)


def test_blocks_are_filled(walk) -> None:  # type: ignore[no-untyped-def]
    before = page_text(
        "```console\n$ echo\nold\n$ echo | tr e E\n```",
        "<!-- status: 3 -->\n```console\n$ echo '== A ==' inside '== B =='\n…\n```",
        "<!-- section: A -->\n```\nold\n```",
        "<!-- lines: code.py: def f … return -->\n```python\n```",
        "```python\nuntouched\n```",
    )
    assert walk.filled(before) == page_text(
        "```console\n$ echo\necho\n$ echo | tr e E\nEcho\n```",
        "<!-- status: 3 -->\n```console\n$ echo '== A ==' inside '== B =='\n…\n```",
        "<!-- section: A -->\n```\ninside\n```",
        "<!-- lines: code.py: def f … return -->\n```python\ndef f():\n    b = 2\n    return b\n```",
        "```python\nuntouched\n```",
    )


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("```console\n$ echo one\n```", "`echo one` ended with 1 and not 0"),
        ("<!-- status: 1 -->\n```console\n$ echo\n```", "`echo` ended with 0 and not 1"),
        ("<!-- section: A -->\n```\n```", "no section 'A'"),
        ("<!-- lines: gone.py: a -->\n```\n```", "there is no file gone.py"),
        ("<!-- lines: code.py: gone -->\n```\n```", "no line that begins with 'gone'"),
        ("<!-- lines: code.py: c = … a = -->\n```\n```", "no line after 'c =' that begins with 'a ='"),
    ],
)
def test_what_is_not_so_is_said(block: str, problem: str, walk) -> None:  # type: ignore[no-untyped-def]
    import pages

    with pytest.raises(pages.PageError, match=re.escape(problem)):
        walk.filled(page_text(block))
