#!/usr/bin/env python3
"""Collectives side by side with Open MPI, MPICH, UCX's own test and the limit of direct shared memory, on one machine.

Builds the peers from their sources, runs each and ours in turn, several rounds, with the same ranks, sizes and way
of timing (a barrier before each call, outside its time; the mean over ranks; the median over calls), and writes
medians over rounds, ratios, the targets and every raw row to benches/results.

    benches/compare_collectives.py --mpi-peer mpi_collectives.c --limit-peer shm_limit.c --mpi --ucx --rounds 5

With --mpi our program is also built against Open MPI and against MPICH (feature 'mpi'), and our schedules over MPI's
messages are measured beside the library's own collectives: those that the peer has, up to 64 KiB also as all others are,
beside our program with '--algo native', which calls the library's. There one loop times both, and what a barrier of ours and
one of theirs leave behind for the call after them is no part of the difference; what our program adds to a call of MPI, some
tens of nanoseconds, is. With --ucx our messages over UCX are measured beside
ucx_perftest over the same UCX transports, and our collectives beside Open MPI's over them; with --mpi too, those that the
peer does not have. What is not installed is skipped with the reason.

The peers' sources are not in this repository. The MPI peer is C for mpicc and runs on two ranks of mpirun with one argument,
the name that it gives itself; for each of reduce_scatter, all_gather and all_reduce, and with an 'i' before their names for the
calls that are started and waited for, and for each size from 1 KiB to 64 MiB in powers of four, it prints a line of JSON with
lib (that name), coll, bytes (the total, as nccl-tests counts it) and us. The limit is C for gcc and runs by itself, with two
ranks of its own, without arguments; for reduce_scatter and all_gather and the same sizes it prints lines such as
'reduce_scatter 1024 0.12 us', with anything behind them. It binds its ranks by 'CPU_SET(me,&c)', which is changed to the
processors that all are measured on: two of different cores, where there are such.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import side_by_side as sbs

RANKS = 2
COLLECTIVES = ["reduce_scatter", "all_gather", "all_reduce"]
# What the MPI peer does not measure.
OTHERS = ["broadcast", "reduce", "all_to_all", "gather", "scatter"]
# And what is only started there, to be waited for.
STARTED = ["i" + name for name in COLLECTIVES]
# What the limit has.
LIMITED = ["reduce_scatter", "all_gather"]
# Where its source binds its ranks: to processors that need not be those that the others are measured on.
LIMIT_BINDS = "CPU_SET(me,&c)"
SIZES = [1024 * 4**i for i in range(9)]
# From and to which size, how often, and how often before: as the peers, less often what takes long.
CALLS = [(SIZES[0], 65536, 200, 3), (262144, 2**22, 40, 3), (2**24, SIZES[-1], 12, 3)]
# The same once the caches keep what they can, which takes many calls: on an AMD EPYC of 2019 reduce_scatter of 1 MiB in shared
# memory takes 48 us by the calls above and 20 us by these.
SETTLED = [(65536, 2**22, 100, 100)]
# In names of rows: the library's collectives as our program calls them, which the peer measures too.
ONE_LOOP = " in one loop"
# Messages in one direction, and how many are under way. Each of ours has a buffer of its own, while all of ucx_perftest's
# come from one; a window of ours takes no more memory than that, or caches would decide: a plain program over ucp with
# eight buffers of 16 MiB gets half of what it gets with one.
MESSAGES = {2**16: 8, 2**20: 1, 2**24: 1}
MPIRUN = {
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "-n", RANKS, "--bind-to", "none"],
    "mpich": ["mpirun.mpich", "-n", RANKS, "-bind-to", "none"],
}
# Open MPI takes UCX by itself only over networks that it knows.
OVER_UCX = ["--mca", "pml", "ucx", "--mca", "osc", "^ucx", "--mca", "pml_ucx_tls", "any", "--mca", "pml_ucx_devices", "any"]
# UCX's transports on one host, and Open MPI over the same link.
LINKS = {
    "posix,cma": [*OVER_UCX, "-x", "UCX_TLS=self,posix,cma"],
    "tcp": [*OVER_UCX, "-x", "UCX_TLS=self,tcp", "-x", "UCX_NET_DEVICES=lo"],
}


def binder(folder, cpus):
    """What runs its arguments as a rank of either mpirun on that rank's processor: the two have other words for it each, and
    count processors that are not ours, too."""
    path = folder / "bind"
    path.write_text("#!/bin/sh\nrank=${OMPI_COMM_WORLD_LOCAL_RANK:-$MPI_LOCALRANKID}\n"
                    f"case $rank in 0) cpu={cpus[0]};; 1) cpu={cpus[1]};; "
                    "*) echo \"there is no processor for a rank '$rank'\" >&2; exit 2;; esac\n"
                    'exec taskset -c $cpu "$@"\n')
    path.chmod(0o755)
    return path


def compile_peers(args, folder, bind, cpus, skip):
    """Builds the peers' sources and gives command lines by name, and versions."""
    peers, versions = {}, {}
    for library, launch in MPIRUN.items() if args.mpi_peer else []:
        if not shutil.which(f"mpicc.{library}") or not shutil.which(launch[0]):
            skip(f"{library}, because mpicc.{library} or {launch[0]} is not installed")
            continue
        program = folder / library
        sbs.run([f"mpicc.{library}", "-O2", "-o", program, args.mpi_peer])
        peers[library] = [*launch, bind, program, library]
        text = sbs.run([launch[0], "--version"])
        found = re.search(r"(\d+\.\d+(\.\d+)?\S*)", text)
        versions[library] = found.group(1) if found else text.strip().split("\n")[0]
    if args.ucx and "openmpi" in peers:
        for link, flags in LINKS.items():
            name = f"openmpi ucx {link}"
            peers[name] = [*MPIRUN["openmpi"], *flags, bind, folder / "openmpi", name]
    if args.limit_peer:
        program, source = folder / "limit", folder / "limit.c"
        sbs.need("gcc")
        # It binds its ranks itself.
        source.write_text(sbs.changed("--limit-peer", args.limit_peer, (LIMIT_BINDS, f"CPU_SET(me?{cpus[1]}:{cpus[0]},&c)")))
        _, refused = sbs.attempt(["gcc", "-O3", "-march=native", "-w", "-o", program, source])
        if refused:
            # It is written for AVX-512.
            why = next((line for line in refused.splitlines() if "error:" in line), refused)
            skip(f"the limit of direct shared memory, because gcc makes no program of it for this processor: {why}")
        else:
            peers["limit"] = [*sbs.on(*cpus), program]
            versions["limit"] = "gcc " + sbs.run(["gcc", "-dumpfullversion"]).strip()
    return peers, versions


def peer_rows(name, command):
    """Runs a peer once: one row per collective and size."""
    out = sbs.run(command)
    if name == "limit":
        # Such as: reduce_scatter 1024 0.12 us busbw 4.27 GB/s
        found = re.findall(r"^(\w+) (\d+) ([\d.]+) us", out, re.M)
        rows = [{"lib": name, "coll": c, "bytes": int(b), "us": float(us)} for c, b, us in found]
    else:
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        rows = [{key: line.get(key) for key in ("lib", "coll", "bytes", "us")} for line in lines]
    sbs.need_rows(name, rows, LIMITED if name == "limit" else [*COLLECTIVES, *STARTED], SIZES, out)
    return rows


def bench(launch, program, collective, flags, env):
    """One run of ours: its results."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run.json"
        sbs.run([*launch, program, "bench", collective, "--json", path, "--quiet", *flags], env=env)
        found = json.loads(path.read_text())
    if found["out_of_bounds"]["count"]:
        sys.exit(f"{collective} {flags} gave wrong results")
    return found["results"]


def our_rows(name, launch, program, flags, env, forms, collectives=COLLECTIVES, calls=CALLS):
    """Runs ours once over some collectives; the started form is what peers call i…."""
    rows = []
    for form, prefix in forms:
        for collective in collectives:
            for least, most, iterations, warmup in calls:
                sizes = ["-b", least, "-e", most, "-f", 4, "-n", iterations, "-w", warmup, "-c", 1, "-z", 3, "--calls", form]
                found = bench(launch, program, collective, [*sizes, *flags], env)
                sbs.need_rows(name, [{"coll": collective, "bytes": row["size"]} for row in found], [collective],
                              [size for size in SIZES if least <= size <= most], "")
                for row in found:
                    rows.append({"lib": name, "coll": prefix + collective, "bytes": row["size"],
                                 "us": round(row["out_of_place_calls"]["p50_us"], 3),
                                 "in_place_us": round(row["in_place_calls"]["p50_us"], 3),
                                 "algorithm": row["out_of_place"]["algorithm"]})
    return rows


def ucx_env(link):
    return {"UCX_TLS": f"self,{link}", **({"UCX_NET_DEVICES": "lo"} if link == "tcp" else {})}


def perftest(link, cpus, flags):
    """What ucx_perftest says, whose two ends meet at a port that may be another's."""
    failure = ""
    for attempt in range(3):
        line = ["ucx_perftest", "-p", 13400 + (os.getpid() + 100 * attempt) % 500]
        with sbs.Running([*sbs.on(cpus[0]), *line, *flags], env=ucx_env(link), stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL) as server:
            until = time.monotonic() + 20
            # Nobody says when it listens; once it has served, or failed, it is gone.
            while server.process.poll() is None and time.monotonic() < until:
                time.sleep(0.2)
                out, failure = sbs.attempt([*sbs.on(cpus[1]), line[0], "127.0.0.1", *line[1:], *flags], env=ucx_env(link))
                if not failure:
                    return out
    sys.exit(f"ucx_perftest over {link} failed: {failure or 'it does not begin to listen'}")


def perftest_rows(link, cpus):
    """ucx_perftest's tagged bandwidth for some sizes."""
    rows = []
    for bytes_ in MESSAGES:
        out = perftest(link, cpus, ["-t", "tag_bw", "-s", bytes_, "-n", max(200, 2**31 // bytes_ // 4), "-w", 50])
        final = next((line.split() for line in out.splitlines() if line.startswith("Final:")), [])
        # Final: iterations, latency of three kinds, bandwidth average and overall in MiB/s, message rates.
        if len(final) < 4:
            sys.exit(f"ucx_perftest printed no line of 'Final:', but:\n{out[-4000:]}")
        rate = float(final[-3]) * 2**20
        rows.append({"lib": "ucx_perftest", "coll": f"tag_bw {link}", "bytes": bytes_, "us": round(bytes_ / rate * 1e6, 3)})
    return rows


def message_rows(launch, program, link):
    """Our messages over the same link: one direction, as many under way as MESSAGES has of their size."""
    rows = []
    for bytes_, window in MESSAGES.items():
        # As often as ucx_perftest is asked to, or nearly.
        iterations = max(200, 2**31 // bytes_ // 4) // window
        flags = ["-b", bytes_, "-e", bytes_, "-n", iterations, "-w", 5, "--ranks", RANKS, "--transport", "ucx",
                 "--one-way", "-m", window, "-c", 0]
        for row in bench(launch, program, "send_recv", flags, ucx_env(link)):
            times = row["out_of_place_calls"]["times_us"]
            rows.append({"lib": "caravan ucx", "coll": f"send_recv {link}", "bytes": bytes_, "window": window,
                         "us": round(sum(times) / len(times), 3)})
    return rows


class Alone:
    """Keeps a command such as `flock FILE` running, in whose time measurements have the machine for themselves."""

    LONGEST = 75

    def __init__(self, command):
        self.command, self.held, self.since = shlex.split(command or ""), None, 0

    def take(self):
        """Waits until the command runs; lets go before, if it has been running for long."""
        if self.held and time.monotonic() - self.since > self.LONGEST:
            self.leave()
        if self.command and not self.held:
            inner = ["sh", "-c", "echo; cat >/dev/null"]
            self.held = subprocess.Popen([*self.command, *inner], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            # Anything before that is its own.
            if b"\n" not in iter(self.held.stdout.readline, b""):
                sys.exit(f"--alone: '{shlex.join(self.command)}' ended without running what it was given")
            self.since = time.monotonic()

    def leave(self):
        if self.held:
            self.held.stdin.close()
            self.held.wait()
            self.held = None


class Found:
    """Medians over rounds."""

    def __init__(self, rows):
        self.rows = rows

    def us(self, lib, coll, bytes_):
        found = [r["us"] for r in self.rows if (r["lib"], r["coll"], r["bytes"]) == (lib, coll, bytes_)]
        return statistics.median(found) if found else None

    def by_round(self, lib, coll, bytes_):
        return {r["round"]: r["us"] for r in self.rows if (r["lib"], r["coll"], r["bytes"]) == (lib, coll, bytes_)}

    def ratio(self, above, below, bytes_):
        """Of two (library, collective): the ratio of their medians, and the median of their ratios in single rounds, which
        tells whether a machine's mood of seconds has met one of them more often."""
        a, b = self.us(*above, bytes_), self.us(*below, bytes_)
        if not a or not b:
            return None
        a_by, b_by = self.by_round(*above, bytes_), self.by_round(*below, bytes_)
        return bytes_, a / b, statistics.median([a_by[r] / b_by[r] for r in a_by if r in b_by])

    def ratios(self, above, below, least=0):
        found = (self.ratio(above, below, s) for s in {**dict.fromkeys(SIZES), **MESSAGES} if s >= least)
        return [ratio for ratio in found if ratio]

    def libs(self):
        return list(dict.fromkeys(r["lib"] for r in self.rows))

    def best(self, libs, coll, bytes_):
        found = [(us, lib) for lib in libs if (us := self.us(lib, coll, bytes_)) is not None]
        return min(found) if found else (None, None)


def busbw(coll, bytes_, us):
    factor = (2 if coll.endswith("all_reduce") else 1) * (RANKS - 1) / RANKS
    factor = 1 if coll in ("broadcast", "reduce") else factor
    return bytes_ / us / 1e3 * factor


def tables(found):
    parts = []
    libs = found.libs()
    mpis = [lib for lib in MPIRUN if lib in libs]
    for coll in [*COLLECTIVES, *OTHERS, *STARTED]:
        have = [lib for lib in libs if any(found.us(lib, coll, s) is not None for s in SIZES)]
        if not any(lib.startswith("caravan") for lib in have):
            continue
        rows = []
        for s in SIZES:
            cells = []
            for lib in have:
                us = found.us(lib, coll, s)
                cells.append("" if us is None else f"{us:.2f} ({busbw(coll, s, us):.2f})")
            ours, peer = found.us("caravan shm", coll, s), found.best(mpis, coll, s)[0]
            limit = found.us("limit", coll.removeprefix("i"), s)
            cells.append("" if not ours or not peer else f"{peer / ours:.2f}")
            cells.append("" if not ours or not limit else f"{ours / limit:.2f}")
            rows.append([sbs.size(s), *cells])
        parts += [f"## {coll}", "Microseconds (bus bandwidth in GB/s).", "",
                  sbs.table(["", *have, f"best of {best_of(mpis)} / shm", "shm / limit"], rows), ""]
    rows = []
    for link in LINKS:
        for s in MESSAGES:
            ours, peer = found.us("caravan ucx", f"send_recv {link}", s), found.us("ucx_perftest", f"tag_bw {link}", s)
            if ours and peer:
                rows.append([link, sbs.size(s), MESSAGES[s], f"{s / ours / 1e3:.2f}", f"{s / peer / 1e3:.2f}",
                             f"{peer / ours:.2f}"])
    if rows:
        parts += ["## Messages over UCX",
                  "GB/s in one direction, the mean over all messages, of which so many are under way at a time.", "",
                  sbs.table(["link", "", "under way", "caravan send_recv", "ucx_perftest tag_bw", "ratio"], rows), ""]
    return parts


def best_of(mpis):
    return " and ".join(mpis) or "no MPI"


def targets(found, args):
    """What was asked for, and what was found at the worst size."""
    rows = []

    def check(text, ratios, holds, show):
        if ratios:
            bytes_, ratio, by_round = show(ratios, key=lambda r: r[1])
            rows.append([text, f"{ratio:.2f} at {sbs.size(bytes_)}", f"{by_round:.2f}",
                         sbs.holds(all(holds(r) for _, r, _ in ratios))])
        else:
            rows.append([text, "not measured", "", ""])

    mpi = [lib for lib in MPIRUN if lib in found.libs()]
    best_mpi = f"the best MPI ({best_of(mpi)})"
    for coll, least in [("reduce_scatter", 4), ("all_gather", 1.5), ("all_reduce", 2)]:
        ours = ("caravan shm", coll)
        best = [(s, (lib, coll)) for s in SIZES if (lib := found.best(mpi, coll, s)[1])]
        wheres = [("", "")] * bool(args.mpi_peer) + [(" in settled caches, to 4 MiB", " settled")] * args.mpi
        for where, suffix in wheres:
            beside = [(s, found.best([lib + suffix for lib in mpi], coll, s)[1]) for s in SIZES if s >= 65536]
            check(f"shm {coll}: at least {least} times {best_mpi} from 64 KiB{where}",
                  [r for s, lib in beside if (r := found.ratio((lib, coll), ("caravan shm" + suffix, coll), s))],
                  lambda r, least=least: r >= least, min)
        if args.mpi_peer:
            check(f"shm {coll}: at most a quarter of the latency of {best_mpi} up to 4 KiB",
                  [r for s, peer in best if s <= 4096 and (r := found.ratio(ours, peer, s))], lambda r: r <= 0.25, max)
        if args.limit_peer and coll in LIMITED:
            check(f"shm {coll}: within 1.3 times of the limit from 256 KiB", found.ratios(ours, ("limit", coll), 2**18),
                  lambda r: r <= 1.3, max)

    def ways(coll):
        """How the libraries' own is measured: in the peer's loop, also in ours, or only there."""
        return ["", ONE_LOOP] if args.mpi and coll in COLLECTIVES else [""] if args.mpi or coll in COLLECTIVES else []

    for library in MPIRUN if args.mpi else []:
        for coll in [*COLLECTIVES, *OTHERS]:
            for how in ways(coll):
                check(f"our {coll} over {library}{how}: at most 1.1 times its own time",
                      found.ratios((f"caravan {library}{how}", coll), (library + how, coll)), lambda r: r <= 1.1, max)
    started = "ireduce_scatter"
    if args.mpi:
        check("our started reduce_scatter over openmpi: at least 3 times MPI_Ireduce_scatter_block from 16 MiB",
              found.ratios(("openmpi", started), ("caravan openmpi", started), 2**24), lambda r: r >= 3, min)
    for link in LINKS if args.ucx else []:
        check(f"our send_recv over ucx {link}: at least 0.9 of ucx_perftest's tag_bw",
              found.ratios(("ucx_perftest", f"tag_bw {link}"), ("caravan ucx", f"send_recv {link}")), lambda r: r >= 0.9, min)
        for coll in [*COLLECTIVES, *OTHERS] if args.mpi_peer else []:
            for how in ways(coll):
                check(f"our {coll} over ucx {link}{how}: at least as fast as Open MPI over it",
                      found.ratios((f"openmpi ucx {link}{how}", coll), (f"caravan ucx {link}{how}", coll)),
                      lambda r: r >= 1, min)
    return rows


def main():
    parser = sbs.parser(__doc__, 5)
    parser.add_argument("--mpi-peer", help="C source of the MPI peer")
    parser.add_argument("--limit-peer", help="C source of the limit of direct shared memory")
    parser.add_argument("--mpi", action="store_true", help="measure our schedules over Open MPI and MPICH")
    parser.add_argument("--ucx", action="store_true", help="measure ours over UCX on this host")
    parser.add_argument("--caravan-openmpi", help="our program built against Open MPI [default: built]")
    parser.add_argument("--caravan-mpich", help="our program built against MPICH [default: built]")
    parser.add_argument("--machine", help="the machine in the result file's name [default: its processor]")
    parser.add_argument("--alone", help="a command before measurements, which runs its arguments when the machine is idle")
    args = sbs.parse(parser)
    if args.mpi and not args.mpi_peer:
        parser.error("--mpi needs --mpi-peer: ours is measured beside it")
    sbs.need("taskset")
    sbs.need_files(*filter(None, [args.mpi_peer, args.limit_peer]))
    cpus = sbs.cpus(RANKS)
    rows = sbs.Record("compare_collectives", args.machine, sbs.given(
        {"--caravan": args.caravan, "--caravan-openmpi": args.caravan_openmpi, "--caravan-mpich": args.caravan_mpich}))
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        bind, both_cpus = binder(folder, cpus), sbs.on(*cpus)
        peers, versions = compile_peers(args, folder, bind, cpus, rows.skip)
        named = sbs.keep(folder, caravan=args.caravan, openmpi=args.caravan_openmpi, mpich=args.caravan_mpich)
        program = named.get("caravan") or sbs.build(folder)
        both = [("blocking", ""), ("started", "i")]
        version = sbs.run([program, "--version"]).strip()
        ours = {"caravan shm": (both_cpus, program, ["--ranks", RANKS, "--transport", "shm"], {}, both[:1])}
        # What calls a library's collectives, which the ours of that name is compared with: as the peers are called.
        natives = {}
        native = ["--transport", "mpi", "--algo", "native"]
        for library in MPIRUN:
            if args.mpi and library in peers:
                path = named.get(library) or sbs.build(folder, library)
                launch = [*MPIRUN[library], bind]
                natives[f"caravan {library}"] = (library, launch, path, native, {})
                ours[f"caravan {library}"] = (launch, path, ["--transport", "mpi"], {},
                                             both if library == "openmpi" else both[:1])
        links = []
        if args.ucx and shutil.which("ucx_perftest"):
            links = list(LINKS)
        elif args.ucx:
            rows.skip("UCX, because ucx_perftest (Debian: ucx-utils) is not installed")
        for link in links:
            flags = ["--ranks", RANKS, "--transport", "ucx"]
            ours[f"caravan ucx {link}"] = (both_cpus, program, flags, ucx_env(link), both[:1])
            if "caravan openmpi" in natives:
                path = natives["caravan openmpi"][2]
                launch = [*MPIRUN["openmpi"], *LINKS[link], bind]
                natives[f"caravan ucx {link}"] = (f"openmpi ucx {link}", launch, path, native, {})
        # Here ours is compared with calls of the libraries' own collectives by our program, as often.
        settled = {"caravan shm": ours["caravan shm"][:-1]}
        settled.update((theirs, how) for theirs, *how in natives.values() if theirs in MPIRUN)
        alone = Alone(args.alone)
        for round_ in range(args.rounds):
            # In turn within a round, what is compared one after the other: a change of the machine's mood shows as a spread
            # between rounds, which the raw rows have.
            found = []
            for name, how in ours.items():
                found.append((name, lambda how=how, name=name: our_rows(name, *how)))
                beside = name.removeprefix("caravan ").replace("shm", "limit").replace("ucx", "openmpi ucx")
                if beside in peers:
                    found.append((beside, lambda beside=beside: peer_rows(beside, peers[beside])))
            for name, theirs in natives.items():
                for collective in [*COLLECTIVES, *OTHERS]:
                    known, calls = (ONE_LOOP, CALLS[:1]) if collective in COLLECTIVES else ("", CALLS)
                    for lib, *how in [(name, *ours[name][:-1]), theirs]:
                        lib += known
                        found.append((f"{lib} {collective}", lambda lib=lib, how=how, collective=collective, calls=calls:
                                      our_rows(lib, *how, both[:1], [collective], calls)))
            for collective in COLLECTIVES if len(settled) > 1 else []:
                for name, how in settled.items():
                    name += " settled"
                    found.append((f"{name} {collective}", lambda name=name, how=how, collective=collective:
                                  our_rows(name, *how, both[:1], [collective], SETTLED)))
            found += [(peer, lambda peer=peer: peer_rows(peer, peers[peer])) for peer in peers
                      if peer not in [name for name, _ in found]]
            for link in links:
                found += [(f"tag_bw {link}", lambda link=link: perftest_rows(link, cpus)),
                          (f"send_recv {link}", lambda link=link: message_rows(both_cpus, program, link))]
            for name, measure in found:
                alone.take()
                for row in measure():
                    rows.add({"round": round_, **row})
                print(sbs.stamp(), round_, name, flush=True)
        alone.leave()
    found = Found(rows)
    absent = [flag for flag, value in [("--mpi-peer", args.mpi_peer), ("--limit-peer", args.limit_peer), ("--mpi", args.mpi),
                                       ("--ucx", args.ucx)] if not value]
    parts = ["# Collectives beside Open MPI, MPICH, UCX and the limit of direct shared memory", "",
             f"{RANKS} ranks, f32, sum, registered buffers, out of place. A barrier before each call, outside its time; "
             "the mean over ranks; the median over calls; the median over rounds. Sizes are the total that nccl-tests "
             "counts. send_recv and ucx_perftest: one direction, the mean over all messages.", "",
             "Worst found: of the ratios of medians. By round: there, the median of the ratios in single rounds. Settled: "
             f"{SETTLED[0][2]} calls, after {SETTLED[0][3]} that are not counted; otherwise {CALLS[1][2]} from 256 KiB to 4 MiB, "
             f"after {CALLS[1][3]}.", "", "## Targets", "",
             sbs.table(["target", "worst found", "by round", "holds"], targets(found, args)), "",
             *([f"Targets for which it takes {', '.join(absent)} were not tried.", ""] if absent else []), *tables(found)]
    given = [(flag, value) for flag, value in [("--mpi-peer", args.mpi_peer), ("--limit-peer", args.limit_peer)] if value]
    # The folder that a peer lies in says nothing.
    flags = [word for flag, value in given for word in (flag, pathlib.Path(value).name)]
    flags += ["--mpi"] * args.mpi + ["--ucx"] * args.ucx
    command = shlex.join(["benches/compare_collectives.py", *flags, "--rounds", str(args.rounds)])
    facts = {"processors of the ranks": " and ".join(map(str, cpus)), "caravan": version, **versions}
    rows.write("\n".join(parts), command, facts)


if __name__ == "__main__":
    sbs.command(main)
