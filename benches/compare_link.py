#!/usr/bin/env python3
"""Collectives over UCX between two hosts that a slow link joins, beside the link's rate and Open MPI.

The hosts are two network name spaces of this machine, the link a pair of virtual interfaces whose rate a token bucket
limits (tbf, 1 Gbit/s). Needs root, Debian's iproute2, and libucx0; --mpi-peer and --mpi also Open MPI.

    benches/compare_link.py --mpi-peer mpi_collectives.c --mpi --rounds 3

With --mpi our program is also built against Open MPI (feature 'mpi'), and calls those of its collectives that the peer
does not have ('--algo native').

The MPI peer's source is not in this repository: it is that of compare_collectives.py, whose lines have busbw (GB/s), too. To
take less time it is changed before it is compiled: it has to have the texts 'maxb=64u<<20', 'k<6', which chooses among blocking
and started collectives, and 'S<=65536?200:(S<=4u<<20?40:12)', the number of calls, before which it makes WARMUP that are not
counted, as ours.

Writes medians over rounds, the share of the link's rate, and every raw row to benches/results.
"""

import contextlib
import json
import os
import pathlib
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import side_by_side as sbs

RATE = 0.125  # GB/s: 1 Gbit/s, headers included
# Of these the mean over ranks, as for the peer; of the others the slowest rank, because their senders may end early.
BOTH_WAYS = ["all_reduce", "reduce_scatter", "all_gather"]
# What the MPI peer does not measure.
OTHERS = ["broadcast", "reduce", "all_to_all", "gather", "scatter"]
OPERATIONS = [*BOTH_WAYS, *OTHERS, "send_recv"]
SIZES = [2**16, 2**18, 2**20, 2**22, 2**24]
LEAST = 2**20
# Calls that are not counted, of the peer and of ours.
WARMUP = 3
ADDRESSES = ["10.77.64.1", "10.77.64.2"]
HOSTS = [f"caravan-link-{os.getpid()}-{i}" for i in range(2)]
DEVICES = [f"cl{os.getpid()}-{i}" for i in range(2)]


def make_hosts():
    for host in HOSTS:
        sbs.run(["ip", "netns", "add", host])
    sbs.run(["ip", "link", "add", DEVICES[0], "netns", HOSTS[0], "type", "veth", "peer", "name", DEVICES[1], "netns",
             HOSTS[1]])
    for host, device, address in zip(HOSTS, DEVICES, ADDRESSES):
        sbs.run(["ip", "-n", host, "addr", "add", f"{address}/24", "dev", device])
        sbs.run(["ip", "-n", host, "link", "set", "lo", "up"])
        sbs.run(["ip", "-n", host, "link", "set", device, "up"])
        sbs.run(["tc", "-n", host, "qdisc", "add", "dev", device, "root", "tbf", "rate", "1gbit", "burst", "128k",
                 "latency", "50ms"])
    for host, device in zip(HOSTS, DEVICES):
        # A device is listed a moment before it carries anything, and UCX looks only once.
        until = time.monotonic() + 20
        while "state UP" not in sbs.run(["ip", "-n", host, "link", "show", "dev", device]):
            if time.monotonic() > until:
                sys.exit(f"the link's end {device} is not up")
            time.sleep(0.02)


def remove_hosts():
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], stderr=subprocess.DEVNULL)


def bench(program, operation, out, *flags):
    """Our program's command line."""
    return [program, "bench", operation, "-b", SIZES[0], "-e", SIZES[-1], "-f", 4, "-n", 10, "-w", WARMUP, "-c", 1, "-z", 3,
            "-a", 1 if operation in BOTH_WAYS else 3, "--quiet", "--json", out, *flags]


def results(lib, operation, out):
    """What our program has found."""
    found = json.loads(out.read_text())
    if found["out_of_bounds"]["count"]:
        sys.exit(f"{operation} gave wrong results")
    sbs.need_rows(lib, [{"coll": operation, "bytes": row["size"]} for row in found["results"]], [operation], SIZES, "")
    for row in found["results"]:
        yield {"lib": lib, "coll": operation, "bytes": row["size"],
               "us": round(row["out_of_place_calls"]["p50_us"], 1),
               "busbw": round(row["out_of_place"]["bus_bw"] * row["out_of_place"]["time"]
                              / row["out_of_place_calls"]["p50_us"], 5),
               "algorithm": row["out_of_place"]["algorithm"]}


def our_rows(program, operation, folder, cpus):
    """One run: a rank on each host, started by hand as a cluster without a launcher would."""
    out = folder / "run.json"
    common = {"UCX_TLS": "self,tcp", "CARAVAN_WORLD": "2", "CARAVAN_LOCAL_RANK": "0", "CARAVAN_LOCAL_SIZE": "1",
              "CARAVAN_RENDEZVOUS": f"{ADDRESSES[0]}:29517", "CARAVAN_JOB": f"link-{os.getpid()}",
              "CARAVAN_TOKEN": "link"}
    command = bench(program, operation, out, "--transport", "ucx")
    with contextlib.ExitStack() as both:
        ranks = [both.enter_context(sbs.Running(["ip", "netns", "exec", host, *sbs.on(cpus[rank]), *command],
                                                env={**common, "CARAVAN_RANK": str(rank)}, stderr=subprocess.PIPE))
                 for rank, host in enumerate(HOSTS)]
        for rank, running in enumerate(ranks):
            _, failure = running.finish()
            if failure:
                sys.exit(f"{operation}, rank {rank}: {failure}")
    return results("caravan ucx", operation, out)


def over_mpi(folder, over, program, cpus):
    """Runs a program over Open MPI between the hosts, which mpirun reaches through an agent that enters their name spaces."""
    enter, agent = folder / "enter", folder / "agent"
    # mpirun would bind the first rank of each host to the first processor, and here both hosts have the same one.
    enter.write_text(f"#!/bin/sh\nhost=$1; shift\ncase $host in {HOSTS[0]}) cpu={cpus[0]};; *) cpu={cpus[1]};; esac\n"
                     "exec ip netns exec $host taskset -c $cpu unshare --uts --mount sh -c "
                     "'hostname $0 && mount -t tmpfs none /dev/shm && exec \"$@\"' $host \"$@\"\n")
    agent.write_text("#!/bin/sh\nwhile :; do case $1 in -*) shift;; *) break;; esac; done\nhost=$1; shift\n"
                     f"case $host in {ADDRESSES[0]}) name={HOSTS[0]};; {ADDRESSES[1]}) name={HOSTS[1]};; esac\n"
                     f"exec {enter} $name sh -c \"$*\"\n")
    for script in (enter, agent):
        script.chmod(0o755)
    subnet = f"{ADDRESSES[0]}/24"
    ways = {
        "openmpi tcp": ["--mca", "pml", "ob1", "--mca", "btl", "self,tcp"],
        "openmpi ucx": ["--mca", "pml", "ucx", "--mca", "osc", "^ucx", "--mca", "pml_ucx_tls", "any", "--mca",
                        "pml_ucx_devices", "any", "-x", "UCX_TLS=tcp,self"],
    }
    command = [enter, HOSTS[0], "mpirun.openmpi", "--allow-run-as-root", "--bind-to", "none", "-n", 2, "--host",
               ",".join(f"{a}:1" for a in ADDRESSES), "--mca", "plm_rsh_agent", agent, "--mca", "oob_tcp_if_include",
               subnet, "--mca", "btl_tcp_if_include", subnet, *ways[over], *program]
    return sbs.run(command)


def peer_rows(folder, over, cpus):
    out = over_mpi(folder, over, [f"{folder}/peer", over], cpus)
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    rows = [{key: line.get(key) for key in ("lib", "coll", "bytes", "us", "busbw")} for line in lines]
    sbs.need_rows(over, rows, BOTH_WAYS, SIZES, out)
    return [row for row in rows if row["bytes"] in SIZES]


def native_rows(program, operation, folder, over, cpus):
    """Those of Open MPI's collectives that the peer does not have, by our program."""
    out = folder / "native.json"
    over_mpi(folder, over, bench(program, operation, out, "--transport", "mpi", "--algo", "native"), cpus)
    return results(over, operation, out)


def main():
    parser = sbs.parser(__doc__, 3)
    parser.add_argument("--mpi-peer", help="C source of the MPI peer")
    parser.add_argument("--mpi", action="store_true", help="measure Open MPI's other collectives, too")
    parser.add_argument("--caravan-openmpi", help="our program built against Open MPI [default: built]")
    parser.add_argument("--machine", help="the machine in the result file's name [default: its processor]")
    args = sbs.parse(parser)
    if args.mpi and not args.mpi_peer:
        parser.error("--mpi needs --mpi-peer: ours is measured beside it")
    if os.geteuid():
        sys.exit("this comparison needs root, which makes name spaces and the link between them")
    for program, package in [("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")]:
        if not shutil.which(program):
            sys.exit(f"{program} is not installed (Debian: {package})")
    sbs.need_files(*filter(None, [args.mpi_peer]))
    cpus = sbs.cpus(len(HOSTS))
    rows = sbs.Record("compare_link", args.machine,
                      sbs.given({"--caravan": args.caravan, "--caravan-openmpi": args.caravan_openmpi}))
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        named = sbs.keep(folder, caravan=args.caravan, openmpi=args.caravan_openmpi)
        program = named.get("caravan") or sbs.build(folder)
        versions = {"processors of the ranks": " and ".join(map(str, cpus)),
                    "caravan": sbs.run([program, "--version"]).strip()}
        peers = []
        if args.mpi_peer and shutil.which("mpicc.openmpi") and shutil.which("mpirun.openmpi"):
            # Blocking collectives up to our largest size only, and as often as ours: the rest would take minutes.
            less = [("maxb=64u<<20", "maxb=16u<<20"), ("k<6", "k<3"), ("S<=65536?200:(S<=4u<<20?40:12)", "10")]
            (folder / "peer.c").write_text(sbs.changed("--mpi-peer", args.mpi_peer, *less))
            sbs.run(["mpicc.openmpi", "-O2", "-o", folder / "peer", folder / "peer.c"])
            versions["openmpi"] = sbs.run(["mpirun.openmpi", "--version"]).split("\n")[0].split()[-1]
            peers = ["openmpi tcp", "openmpi ucx"]
        elif args.mpi_peer:
            rows.skip("Open MPI, because mpicc.openmpi or mpirun.openmpi is not installed")
        native = named.get("openmpi")
        if args.mpi and peers and not native:
            native = sbs.build(folder, "openmpi")
        try:
            make_hosts()
            for round_ in range(args.rounds):
                for operation in OPERATIONS:
                    for row in our_rows(program, operation, folder, cpus):
                        rows.add({"round": round_, **row})
                print(sbs.stamp(), round_, "caravan", flush=True)
                for over in peers:
                    for row in peer_rows(folder, over, cpus):
                        rows.add({"round": round_, **row})
                    for operation in OTHERS if native else []:
                        for row in native_rows(native, operation, folder, over, cpus):
                            rows.add({"round": round_, **row})
                    print(sbs.stamp(), round_, over, flush=True)
        finally:
            remove_hosts()

    def median(lib, coll, bytes_, key):
        found = [r[key] for r in rows if (r["lib"], r["coll"], r["bytes"]) == (lib, coll, bytes_)]
        return statistics.median(found) if found else None

    table, worst = [], []
    for operation in OPERATIONS:
        for bytes_ in SIZES:
            us, busbw = (median("caravan ucx", operation, bytes_, key) for key in ("us", "busbw"))
            theirs = [(median(peer, operation, bytes_, "us"), peer) for peer in peers]
            cells = ["" if found is None else f"{found:.0f}" for found, _ in theirs]
            best = min((found for found, _ in theirs if found), default=None)
            table.append([operation, sbs.size(bytes_), f"{us:.0f}", f"{busbw:.4f}", f"{busbw / RATE:.3f}", *cells,
                          f"{best / us:.2f}" if best else ""])
            if bytes_ >= LEAST:
                worst.append((operation, bytes_, busbw / RATE, best / us if best else None))
    share = min(worst, key=lambda w: w[2])
    targets = [["at least 0.9 of the link's rate from 1 MiB", f"{share[2]:.3f}: {share[0]}, {sbs.size(share[1])}",
                "yes" if share[2] >= 0.9 else "no"]]
    beside = [w for w in worst if w[3]]
    faster = "at least as fast as the faster Open MPI from 1 MiB"
    if beside:
        least = min(beside, key=lambda w: w[3])
        targets.append([faster, f"{least[3]:.2f}: {least[0]}, {sbs.size(least[1])}",
                        "yes" if least[3] >= 1 else "no"])
    else:
        targets.append([faster, "not measured", ""])
    text = "\n".join([
        "# Collectives over UCX across a link of 1 Gbit/s", "",
        "Two ranks, each in a network name space of its own; f32, sum, out of place, results checked. A barrier before each "
        "call, outside its time; the mean over ranks where Open MPI is beside it, else the slowest rank; the "
        "median over calls, the median over rounds. The rate of the link "
        "(0.125 GB/s in each direction) counts the headers of TCP, IP and Ethernet too. Sizes as nccl-tests counts them. "
        "Of mpi_collectives.c the blocking collectives up to 16 MiB, 10 calls each like ours; Open MPI's others are called by "
        "our program. "
        "The token bucket lets 128 KiB pass at once after a pause, so small calls can be above the link's rate.",
        "", "## Targets", "", sbs.table(["target", "worst found", "holds"], targets), "", "## Rows", "",
        sbs.table(["", "", "us", "busbw GB/s", "of the link", *(f"{p} us" for p in peers), "best Open MPI / ours"], table), ""])
    flags = ["--mpi-peer", pathlib.Path(args.mpi_peer).name] if args.mpi_peer else []
    flags += ["--mpi"] * args.mpi
    command = shlex.join(["benches/compare_link.py", *flags, "--rounds", str(args.rounds)])
    rows.write(text, command, versions)


if __name__ == "__main__":
    sbs.command(main)
