"""What `stalloc fit` prints: one row for each way to run the program, the program as it is first."""

from pathlib import Path

from stalloc.cli.output import command_text, note_texts, size_text, table_console
from stalloc.cli.tables import print_prose, print_table
from stalloc.device.known_gpus import VirtualGPU
from stalloc.figures import human_bytes, human_seconds
from stalloc.fitting.fit_record import Candidate, Fit, undominated
from stalloc.fitting.tier_search import BY_THE_PROCESSOR
from stalloc.printable import printable


def print_fit(fit: Fit, gpu: VirtualGPU, num_trials: int, files: list[str]) -> None:
    """Print the table, how its figures are known, and what became of the program's `files`."""
    console = table_console()
    console.print(
        f"{printable(gpu.name)}: a budget of {human_bytes(fit.budget_bytes)} of {human_bytes(fit.gpu_bytes)}, "
        f"{num_trials} runs of {printable(fit.program.name)}"
    )
    tiers = {"host memory": "host_bytes", "on disk": "disk_bytes"}
    shown = {title: name for title, name in tiers.items() if any(getattr(one, name) for one in fit.candidates)}
    marked = set(undominated(fit.candidates)) if shown else set()
    rows = [
        _row("*" if number == fit.best else "+" * (number in marked), one, fit, list(shown.values()))
        for number, one in enumerate(fit.candidates)
    ]
    columns = ("", "way to run it", "", "stalloc reserves", "PyTorch reserves", *shown, "est. step", "est. factor",
               "checked")  # fmt: skip
    print_table(console, columns, rows, text_columns=3, indent="  ")
    meant = (
        "reserves: at the most, from the first allocation; PyTorch with plenty of memory, the same blocks recomputed"
    )
    print_prose(console, meant, indent="  ")
    if marked:
        print_prose(
            console,
            "+: no other way needs less of one and no more of the rest: memory of each kind, and time",
            indent="  ",
        )
    is_compiled = any(one.technique == "compile-budget" for one in fit.candidates)
    but = "; compiled code that saves less may round otherwise" if is_compiled else ""
    on_processor = any(one.technique in BY_THE_PROCESSOR for one in fit.candidates)
    but += "; updates on the processor round otherwise" if on_processor else ""
    print_prose(console, f"losses and gradients are the same to the last bit in all of them{but}", indent="  ")
    print_prose(console, f"est.: {fit.estimate}; bytes are measured on a virtual GPU", indent="  ")
    for note in [*note_texts(fit.notes), *files]:
        print_prose(console, note, indent="  ")


def print_next(fit: Fit, output: Path, command: list[str], named: Path | None, folder: str) -> None:
    """Print what to type for a run that keeps the budget.

    `named` is the fit's file if a run would not find it by itself; `folder` is the folder of --disk.
    """
    host_bytes, on_disk = fit.settings.host_bytes, fit.candidates[fit.best].disk_bytes
    more = ["--host", size_text(host_bytes)] if host_bytes else []
    more += ["--disk", f"{folder}:{size_text(fit.settings.tiers.disk_bytes)}"] if on_disk else []
    more += ["--fit", str(named)] if named else []
    words = command_text("stalloc", "run", "--budget", size_text(fit.budget_bytes), *more, *command)
    table_console().print(f"next: {words}    (settings and plan are kept in {printable(str(output))})")


def _row(mark: str, one: Candidate, fit: Fit, shown: list[str]) -> list[str]:
    host = [human_bytes(size) if (size := getattr(one, name)) else "-" for name in shown]
    if one.refused:
        return ["", one.what, "refused", "-", "-", *host, "-", "-", printable(one.refused)]
    told = "fits" if one.fits(fit.budget_bytes) else "does not fit"
    return [
        mark,
        one.what,
        told,
        human_bytes(one.needed_bytes) if one.needed_bytes else "-",
        human_bytes(one.native_bytes) if one.native_bytes else "-",
        *host,
        human_seconds(fit.step_seconds + one.added_seconds),
        f"{one.factor:.2f}",
        one.checked,
    ]
