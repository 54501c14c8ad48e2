"""`medusa`: the pipeline from a terminal. Parses, calls, prints; exit codes are 0, 1, 2 (input) and 130 (interrupted).

Heavy imports happen inside the commands, so that `medusa --help` answers at once.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

import flows  # noqa: F401  (sets the environment before anything reads it)
from flows import cli_registry, cli_study
from flows.cli_options import (
    AcceptanceRule,
    AsJson,
    CompileOption,
    Config,
    Model,
    Overrides,
    Root,
    Stop,
    Temperature,
    TopK,
    TopP,
    err,
    log_to_terminal,
    out,
    root_of,
    sampling_params,
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Make a language model answer faster without a second model (MEDUSA, arXiv 2401.10774).\n\n"
    "`medusa run` takes a backbone and ends with trained heads, a tree chosen for this machine, a measured and "
    "lossless speedup, and a registered version. `medusa generate` answers with it.\n\n"
    "Start with `medusa run --plan`, which says what would happen and runs nothing.",
)
bench = typer.Typer(no_args_is_help=True, help="Measurements on prompts of your own.")
app.add_typer(bench, name="bench")
app.add_typer(cli_study.app, name="study")
app.add_typer(cli_registry.app, name="registry")

_INTERRUPTED = 130


@app.command()
def run(
    config: Config = None,
    overrides: Overrides = None,
    root: Root = None,
    until: Annotated[str, typer.Option(help="Last stage to run.")] = "publish",
    plan: Annotated[bool, typer.Option("--plan", help="Say what would run and what it costs; run nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the pipeline: backbone, prompts, distill, teacher, train, ranks, latency, tree, benchmark, publish.

    What is already there is not done again; after a crash, run the same command.
    """
    from flows.config import load_config
    from flows.plan import make_plan, print_plan
    from flows.stages import stages_of
    from infra.errors import UserError

    settings, place = load_config(config, overrides or []), root_of(root)
    names = [*(stage.name for stage in stages_of(settings)), "publish"]
    if until not in names:
        raise UserError(f"--until {until!r} is no stage of this run; its stages are {', '.join(names)}")
    if plan:
        planned = make_plan(settings, place, until)
        if as_json:
            print(json.dumps(planned, indent=2))
        else:
            print_plan(planned, out)
        if planned["problems"]:
            raise UserError("this can't be carried out: " + "; ".join(planned["problems"]))
        return
    log_to_terminal()
    # A failed stage is reported by this command, in one paragraph; Prefect would print its traceback first.
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    from flows.prefect_server import begin_server, wait_for_server

    begin_server()
    from flows.full_pipeline import medusa
    from flows.summary import print_summary

    wait_for_server()
    report = medusa(settings, root=str(place), until=until)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_summary(report, out)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    model: Model = "champion",
    root: Root = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: int = 0,
    stop: Stop = None,
    acceptance: AcceptanceRule = "exact",
    backbone: Annotated[
        str | None,
        typer.Option(help="Another backbone to answer with; refused unless it is the one the heads belong to."),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Leave the tree off.")] = False,
) -> None:
    """Answer one prompt with the accelerated engine, token by token, and say how fast it was."""
    from flows.generate import stream_answer

    params = sampling_params(max_new_tokens, temperature, top_p, top_k, seed, stop, acceptance)
    stream_answer(prompt, params, model=model, root=root_of(root), backbone=backbone, plain=plain, console=err)


@app.command()
def chat(
    model: Model = "champion",
    root: Root = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Per answer.")] = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: int = 0,
    stop: Stop = None,
    acceptance: AcceptanceRule = "exact",
    plain: Annotated[bool, typer.Option("--plain", help="Leave the tree off.")] = False,
    compiling: CompileOption = "auto",
) -> None:
    """Talk to the model in the terminal; tokens arrive in the groups that single steps accepted."""
    from flows.chat import converse

    params = sampling_params(max_new_tokens, temperature, top_p, top_k, seed, stop, acceptance)
    converse(params, model=model, root=root_of(root), plain=plain, compile=compiling, console=out)


@bench.command("decode")
def bench_decode(
    prompts: Annotated[Path, typer.Option(help="JSONL in MT-Bench's format: question_id, category, turns.")],
    model: Model = "champion",
    root: Root = None,
    max_minutes: Annotated[float, typer.Option(help="For the timed part; prompts are stratified if it is short.")] = 10,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    turns: Annotated[int, typer.Option(min=1, help="Turns of every conversation.")] = 2,
    dtype: str = "bfloat16",
    compiled: Annotated[bool, typer.Option(help="Also transformers with a compiled static cache.")] = True,
    lookup: Annotated[bool, typer.Option(help="Also transformers with prompt lookup.")] = True,
    compiling: CompileOption = "auto",
    lossless_prompts: Annotated[int, typer.Option(min=1, help="Prompts of the float32 proof.")] = 24,
    threads: Annotated[int | None, typer.Option(help="Default: every core.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write the report as a page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare engines on a prompt file, interleaved in one run, and prove in float32 that no token changed."""
    from flows.bench import decode
    from flows.summary import print_report
    from infra.errors import UserError
    from tasks.benchmark import BenchmarkConfig

    if max_minutes <= 0:
        raise UserError(f"--max-minutes is {max_minutes}; give a positive number")
    config = BenchmarkConfig(
        max_minutes=max_minutes,
        max_new_tokens=max_new_tokens,
        max_turns=turns,
        dtype=dtype,
        compiled=compiled,
        lookup=lookup,
        lossless_prompts=lossless_prompts,
    )
    log_to_terminal()
    report = decode(prompts, config, model=model, root=root_of(root), compile=compiling, threads=threads)
    if html:
        from tasks.report_html import render_report

        html.write_text(render_report(report))
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report, out)


@bench.command("train")
def bench_train(
    root: Root = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of every contestant.")] = 20,
    answers: Annotated[int, typer.Option(min=1, help="Answers per step.")] = 24,
    vocab: Annotated[int, typer.Option(min=1, help="Head vocabulary of the cached contestant.")] = 8192,
    threads: Annotated[int | None, typer.Option(help="Default: every core.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare training heads with the obvious way to write it, on the newest run's answers: speed, memory, loss."""
    from flows.bench import train
    from flows.summary import print_training
    from tasks.bench_train import TrainBenchConfig

    log_to_terminal()
    report = train(TrainBenchConfig(steps=steps, answers=answers, vocab=vocab), root=root_of(root), threads=threads)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_training(report, out)


@app.command("gc")
def collect_garbage(
    root: Root = None,
    days: Annotated[float, typer.Option(min=0, help="Keep what runs of the last so many days made or found.")] = 14,
    delete: Annotated[bool, typer.Option("--delete", help="Remove them; without it they are only listed.")] = False,
    as_json: AsJson = False,
) -> None:
    """List artifacts that no registered version and no recent run refers to, and remove them if told so."""
    from flows.cli_registry import open_registry
    from flows.gc import find_garbage, print_garbage, remove

    found = find_garbage(root_of(root), open_registry(root), days=days)
    gone = remove(root_of(root), found) if delete else []
    if as_json:
        print(
            json.dumps({"found": [each.as_json() for each in found], "removed": [each.name for each in gone]}, indent=2)
        )
    else:
        print_garbage(found, gone, delete, out)


@app.command()
def notify(address: str) -> None:
    """Post to a web address (of Slack's kind) whenever a deployed run fails; asks the Prefect server to do so."""
    from flows.notify import notify_on_failure

    out.print(notify_on_failure(address), soft_wrap=True)


@app.command()
def calibrate(
    model: Model = "champion",
    root: Root = None,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="Where to write the portfolio; default: into the root.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's step times and choose trees for it from a version's ranks; nothing is trained."""
    from flows.calibrate import calibrate_here
    from flows.summary import print_portfolio

    log_to_terminal()
    portfolio, path = calibrate_here(model, root_of(root), overrides or [], output)
    if as_json:
        print(json.dumps(portfolio, indent=2))
    else:
        print_portfolio(portfolio, out)
        out.print(f"written to {path}")


@app.command("tree")
def show_tree(
    model: Model = "champion",
    root: Root = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="The best tree of this size instead of the chosen.")] = None,
    cartesian: Annotated[str | None, typer.Option(help="Widths such as 4,2,1: expectation of that tree.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a version's tree, or what another tree would be expected to give on its calibration data."""
    from flows.calibrate import inspect_tree
    from flows.summary import print_tree

    entry = inspect_tree(model, root_of(root), nodes, cartesian)
    if as_json:
        print(json.dumps(entry, indent=2))
    else:
        print_tree(entry, out)


@app.command()
def doctor(root: Root = None, as_json: AsJson = False) -> None:
    """Say what this machine can do, and what would be skipped."""
    from flows.doctor import examine, print_findings

    findings = examine(root_of(root))
    if as_json:
        print(json.dumps(findings, indent=2))
    else:
        print_findings(findings, out)


def _user_fault(error: BaseException | None) -> str | None:
    """The sentence to show if the user's input, or their disk, is at the bottom of the error."""
    from infra.errors import UserError
    from medusa_core.errors import InputError

    while error is not None:
        if isinstance(error, UserError | InputError):
            return str(error)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            place = error.filename or "the artifact root"
            return (
                f"no space left on the disk while writing {place} ({_free(place)}). Nothing finished was lost: free "
                "some space, or give another --root, and run the same command again"
            )
        error = error.__cause__
    return None


def _free(place: str) -> str:
    path = Path(place)
    while not path.exists() and path != path.parent:
        path = path.parent
    return f"{shutil.disk_usage(path).free / 2**20:.0f} MiB free there"


def main() -> None:
    """Runs the command line with the exit codes that others script against."""
    try:
        app(standalone_mode=True)
    except SystemExit as ending:
        # Typer turns an interrupt into this code without a word.
        if ending.code == _INTERRUPTED:
            err.print("interrupted; run the same command again to go on")
        raise
    except Exception as error:
        if (sentence := _user_fault(error)) is None:
            raise
        err.print(f"error: {sentence}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
