"""What the comparisons share: running commands, medians, and the result file NAME_MACHINE_DATE.md."""

import datetime
import itertools
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benches" / "results"


def build(library=None):
    """Builds the program, perhaps against an MPI library, and gives its path. The next build replaces it there."""
    command = ["cargo", "build", "--release", "--bin", "caravan", "--message-format", "json-render-diagnostics"]
    mpi = {"MPICC": f"mpicc.{library}"} if library else {}
    command += ["--features", "mpi"] if library else []
    env = {**os.environ, **mpi}
    if library:
        # Cargo does not see that another library is asked for.
        subprocess.run(["cargo", "clean", "--release", "-p", "mpi", "-p", "mpi-sys"], cwd=ROOT, check=True)
    out = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
    messages = (json.loads(line) for line in out.splitlines())
    return next(m["executable"] for m in messages if m.get("executable") and m["target"]["name"] == "caravan")


def keep(folder, **programs):
    """Copies of those programs that were named, by name: a build replaces the last one, which may be one of them."""
    found = {name: shutil.which(program) or program for name, program in programs.items() if program}
    return {name: shutil.copy(path, folder / f"named-{name}") for name, path in found.items()}


def need(*programs):
    """Ends the comparison, before anything is measured, where one of these is missing."""
    missing = [str(program) for program in programs if not shutil.which(program)]
    if missing:
        sys.exit(f"this comparison needs {', '.join(missing)}, which is not installed")


def attempt(command, cwd=None, env=None):
    """Runs a command to its end and gives its standard output, and what it said if it failed."""
    done = subprocess.run([str(c) for c in command], cwd=cwd, env={**os.environ, **(env or {})},
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return done.stdout, None
    return done.stdout, f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr[-4000:]}"


def run(command, cwd=None, env=None):
    """Runs a command to its end and gives its standard output; its errors are shown if it fails."""
    out, failure = attempt(command, cwd, env)
    if failure:
        sys.exit(failure)
    return out


def caravan(program, flags):
    """Trains once and gives the run, the steps and the summary of its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder) / "metrics.jsonl"
        run([program, "train", *flags, "--metrics", metrics, "--quiet"])
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    return lines[0]["run"], steps, lines[-1]["summary"]


def median(values):
    return statistics.median(values)


def versions(python):
    """Versions of the peer's libraries, as its own Python says."""
    code = ("import importlib.metadata as m, sys\n"
            "have = {d.metadata['Name']: d.version for d in m.distributions()}\n"
            "print(', '.join([f'Python {sys.version.split()[0]}'] + [f'{n} {have[n]}' for n in "
            "('torch', 'transformers', 'accelerate', 'deepspeed') if n in have]))")
    return run([python, "-c", code]).strip()


def machine():
    """A readable name of the processor, and the same fit for a file name."""
    info = pathlib.Path("/proc/cpuinfo").read_text()
    found = re.search(r"model name\s*:\s*(.*)", info)
    name = found.group(1) if found else os.uname().machine
    cores = len(os.sched_getaffinity(0))
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"{name}, {cores} cores", f"{slug}-{cores}cores"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def holds(found):
    """Whether a target holds, as tables of targets have it."""
    return "yes" if found else "no"


def given(programs):
    """The flags that named programs which were built before, for the command of a result file."""
    return "".join(f" {flag} {flag.removeprefix('--')}" for flag, program in programs.items() if program)


def write(name, text, command, facts, rows, place=None, before=""):
    """Writes the result file: what was found, the command, versions and every raw row. `before` are the flags that named
    programs of which nothing here says how they were built."""
    readable, slug = machine()
    slug = place or slug
    date = datetime.date.today().isoformat()
    # What was measured before on that day stays.
    names = itertools.chain([f"{name}_{slug}_{date}.md"], (f"{name}_{slug}_{date}-{n}.md" for n in itertools.count(2)))
    path = next(path for path in map(RESULTS.joinpath, names) if not path.exists())
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    facts = {"machine": readable, "kernel": os.uname().release,
             "commit of the scripts" if before else "commit": commit.stdout.strip(),
             "load before": facts.pop("load"), **facts}
    body = [text, "## Made by", f"`{command}{before}`", "",
            *[f"- {key}: {value}" for key, value in facts.items()], "", "## Raw rows", "```",
            *[json.dumps(row) for row in rows], "```", ""]
    RESULTS.mkdir(exist_ok=True)
    path.write_text("\n".join(body))
    print(text)
    print(f"written to {path.relative_to(ROOT)}")


def load():
    """How busy the machine is: comparisons want it idle."""
    return " ".join(f"{x:.2f}" for x in os.getloadavg())


def stamp():
    return time.strftime("%H:%M:%S")
