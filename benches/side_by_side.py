"""What the comparisons share: running commands, and the result file NAME_MACHINE_DATE.md."""

import argparse
import contextlib
import datetime
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benches" / "results"
# Seconds after which a command counts as failed: several times what the longest takes.
LIMIT = 1800
# And those that are left to it, once it is asked to end.
GRACE = 10
# What a launcher leaves to those that it starts, as a shell in a step of Slurm: our program would take itself for that step's
# rank, and mpirun that step's processors for all that there are. CARAVAN_TOKEN begins also the names of the tokens that a rank
# is handed. And a tuning table, which would choose other algorithms than the program does by itself.
LEFT = ("CARAVAN_RANK", "CARAVAN_WORLD", "CARAVAN_LOCAL_", "CARAVAN_JOB", "CARAVAN_TOKEN", "CARAVAN_VAL_TOKENS_FD",
        "CARAVAN_RENDEZVOUS", "CARAVAN_BOARD_FD", "CARAVAN_TUNING", "OMPI_COMM_WORLD_", "OMPI_MCA_ess_", "OMPI_MCA_orte_",
        "PMI_", "PMIX_", "MPI_LOCAL", "MV2_COMM_WORLD_", "SLURM_", "TORCHELASTIC_")


def parser(doc, rounds):
    """The options that all comparisons have."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--caravan", help="our program [default: built from this checkout]")
    found.add_argument("--rounds", type=int, default=rounds)
    found.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS",
                       help="after which a command is ended, and has failed: a run of ours or of a peer, and what is done "
                            "before it, but for builds of ours [%(default)s]")
    return found


def parse(options):
    global LIMIT
    args = options.parse_args()
    if args.rounds < 1:
        options.error("--rounds has to be at least 1")
    if not 0 < args.limit < math.inf:
        options.error("--limit has to be a number of seconds above 0")
    LIMIT = args.limit
    return args


def command(main):
    """Runs a comparison: whoever ends it wants what it has started gone, and what it has measured kept."""
    def stop(number, _):
        for each in asked:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    # What nohup ignores stays so.
    asked = [each for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]
    for each in asked:
        signal.signal(each, stop)
    try:
        main()
    finally:
        Record.leave()


def build(folder, library=None):
    """Builds the program, perhaps against an MPI library, and gives a copy in this folder: what cargo has made the next build
    replaces, which may be somebody else's while this is measured."""
    line = ["cargo", "build", "--release", "--bin", "caravan", "--message-format", "json-render-diagnostics"]
    line += ["--features", "mpi"] if library else []
    need("cargo")
    if library:
        # Cargo does not see that another library is asked for.
        run(["cargo", "clean", "--release", "-p", "mpi", "-p", "mpi-sys"], cwd=ROOT)
    with Running(line, cwd=ROOT, env={"MPICC": f"mpicc.{library}"} if library else None, stdout=subprocess.PIPE) as cargo:
        out, failure = cargo.finish(2 * 3600)
    messages = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    built = [m["executable"] for m in messages if m.get("executable") and m["target"]["name"] == "caravan"]
    if failure or not built:
        sys.exit(failure or "cargo has built no program caravan")
    return shutil.copy(built[-1], folder / (f"caravan-{library}" if library else "caravan"))


def path_of(program):
    """The absolute path of a program, which may be run in another folder. Links stay: a Python is that of its environment by
    the place it is called at."""
    need(program)
    return os.path.abspath(shutil.which(program))


def keep(folder, **programs):
    """Copies of those programs that were named, by name: a build replaces the last one, which may be one of them."""
    return {name: shutil.copy(path_of(program), folder / f"named-{name}") for name, program in programs.items() if program}


def need_files(*files):
    for file in files:
        if not os.path.isfile(file):
            sys.exit(f"there is no file {file}")


def changed(flag, file, *changes):
    """The text of a peer's source, which this flag names, with other words for some. Each of those has to be there, or something
    else would be measured."""
    text = pathlib.Path(file).read_text()
    for old, new in changes:
        if old not in text:
            sys.exit(f"{flag} {file} has no '{old}', which is to be replaced by '{new}'")
        text = text.replace(old, new)
    return text


def need(*programs):
    """Ends the comparison, before anything is measured, where one of these is missing."""
    missing = [str(program) for program in programs if not shutil.which(program)]
    if missing:
        sys.exit(f"this comparison needs {', '.join(missing)}, which is not installed")


class Running:
    """A command in a session of its own, which ends with all that it has started: that bears a mark in its environment."""

    count = itertools.count()

    def __init__(self, line, cwd=None, env=None, **streams):
        self.line = [str(word) for word in line]
        self.mark = f"SIDE_BY_SIDE={os.getpid()}.{next(self.count)}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(LEFT)}
        self.process = subprocess.Popen(self.line, cwd=cwd, env={**clean, **(env or {}), **dict([self.mark.split("=")])},
                                        encoding="utf-8", errors="replace", start_new_session=True, **streams)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def finish(self, limit=None):
        """Its standard output, and what it said if it failed, or that its time was over."""
        limit, late = limit or LIMIT, False
        try:
            out, errors = self.process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            late = True
            self.end()
            try:
                out, errors = self.process.communicate(timeout=GRACE)
            except subprocess.TimeoutExpired:
                out, errors = "", ""
        if self.process.returncode == 0 and not late:
            return out or "", None
        how = f"was ended after {limit:g} s" if late else f"ended with {self.process.returncode}"
        return out or "", f"{' '.join(self.line)} {how}:\n{(errors or '')[-4000:]}"

    def end(self):
        """Asks it to end, as launchers then end their ranks, and kills what is left."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(GRACE)
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left(self):
        mark = self.mark.encode()
        for place in pathlib.Path("/proc").glob("[0-9]*/environ"):
            # Some are gone by now, or another's.
            with contextlib.suppress(OSError):
                if mark in place.read_bytes().split(b"\0"):
                    yield int(place.parent.name)


def attempt(line, cwd=None, env=None):
    """Runs a command to its end and gives its standard output, and what it said if it failed."""
    with Running(line, cwd, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        return running.finish()


def run(line, cwd=None, env=None):
    """Runs a command to its end and gives its standard output; its errors are shown if it fails."""
    out, failure = attempt(line, cwd, env)
    if failure:
        sys.exit(failure)
    return out


def need_rows(name, rows, collectives, sizes, out):
    """Ends the comparison where a row of these collectives and sizes is missing, which would pass for one that is fine."""
    there = {(row["coll"], row["bytes"]) for row in rows if row.get("us", 1)}
    missing = [f"{coll} of {bytes_}" for coll in collectives for bytes_ in sizes if (coll, bytes_) not in there]
    if missing:
        sys.exit(f"{name} gave no row for {', '.join(missing)} bytes, but:\n{out[-4000:]}")


def caravan(program, flags, launch=()):
    """Trains once and gives the run, the steps and the summary of its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder) / "metrics.jsonl"
        run([*launch, program, "train", *flags, "--metrics", metrics, "--quiet"])
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    return lines[0]["run"], steps, lines[-1]["summary"]


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


def cpus(count):
    """Processors for ranks, of those that this process may use: of different cores as long as there are such."""
    def place(cpu):
        folder = pathlib.Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            return int((folder / "physical_package_id").read_text()), (folder / "thread_siblings_list").read_text()
        except OSError:
            return 0, str(cpu)

    allowed = sorted(os.sched_getaffinity(0), key=lambda cpu: (place(cpu)[0], cpu))
    cores = {}
    for cpu in allowed:
        cores.setdefault(place(cpu), cpu)
    firsts = [*cores.values()]
    found = [*firsts, *(cpu for cpu in allowed if cpu not in firsts)][:count]
    if len(found) < count:
        sys.exit(f"this comparison needs a processor for each of {count} ranks, and may use {len(found)}")
    return found


def on(*cpus):
    """What runs a command on these processors only."""
    return ["taskset", "-c", ",".join(map(str, cpus))]


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def size(bytes_):
    """A number of bytes, as tables have it."""
    for unit, name in [(2**20, "MiB"), (2**10, "KiB")]:
        if bytes_ >= unit:
            return f"{bytes_ // unit} {name}"
    return f"{bytes_} B"


def holds(found):
    """Whether a target holds, as tables of targets have it."""
    return "yes" if found else "no"


def given(programs):
    """The flags that named programs which were built before, for the command of a result file."""
    return "".join(f" {flag} {flag.removeprefix('--')}" for flag, program in programs.items() if program)


class Record(list):
    """What is measured, row by row, and what it is measured on. Each row is also in a file of its own as soon as it is there, so
    that a failure loses none. `before` are the flags that named programs of which nothing here says how they were built."""

    last = None

    def __init__(self, name, place=None, before=""):
        super().__init__()
        self.name, self.before, self.skips = name, before, []
        readable, slug = machine()
        self.slug = place or slug
        try:
            commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, stdout=subprocess.PIPE,
                                    stderr=subprocess.DEVNULL, text=True).stdout.strip()
        except OSError:
            commit = ""
        self.facts = {"machine": readable, "kernel": os.uname().release,
                      "commit of the scripts" if before else "commit": commit or "not known", "load before": load()}
        number, self.path = tempfile.mkstemp(prefix=f"{name}-", suffix=".jsonl")
        self.file = os.fdopen(number, "w")
        Record.last = self

    def add(self, row):
        self.append(row)
        print(json.dumps(row), file=self.file, flush=True)

    def skip(self, what):
        self.skips.append(what)
        print(f"skipped: {what}")

    @classmethod
    def leave(cls):
        """At the end, however that came: says where rows are that no result file has."""
        if cls.last and len(cls.last):
            print(f"no result is written; what was measured until then is in {cls.last.path}", file=sys.stderr)
        elif cls.last:
            os.unlink(cls.last.path)

    def write(self, text, command, facts):
        """Writes the result file: what was found, the command, versions and every raw row."""
        date = datetime.date.today().isoformat()
        # What was measured before on that day stays.
        stem = f"{self.name}_{self.slug}_{date}"
        names = itertools.chain([f"{stem}.md"], (f"{stem}-{n}.md" for n in itertools.count(2)))
        path = next(path for path in map(RESULTS.joinpath, names) if not path.exists())
        told = [*self.facts.items(), *facts.items(), *(("skipped", what) for what in self.skips)]
        body = [text, "## Made by", f"`{command}{self.before}`", "", *[f"- {key}: {value}" for key, value in told], "",
                "## Raw rows", "```", *[json.dumps(row) for row in self], "```", ""]
        RESULTS.mkdir(exist_ok=True)
        path.write_text("\n".join(body))
        os.unlink(self.path)
        Record.last = None
        print(text)
        print(f"written to {path.relative_to(ROOT)}")


def load():
    """How busy the machine is: comparisons want it idle."""
    return " ".join(f"{x:.2f}" for x in os.getloadavg())


def stamp():
    return time.strftime("%H:%M:%S")
