//! Flags of an operation, read into what it does.

use super::*;
use crate::args::tests::bench;
use crate::bench::args::{BenchCommand, Task};

pub fn plan(flags: &str) -> Result<Plan> {
    let bench = bench(flags);
    let Task::Operation(operation, args) = bench.command.task() else { panic!("{flags}") };
    Plan::new(operation, args)
}

#[test]
fn flags_of_nccl_tests_mean_what_they_mean_there() {
    let p =
        plan("all_reduce -b 8 -e 128M -f 2 -n 50 -w 5 -d bfloat16 -o avg -a 3 -z 1 -c 0 -m 2 -N 3").unwrap();
    assert_eq!(p.operation, Operation::AllReduce);
    assert_eq!(p.repeats.sweep, Sweep { begin: 8, end: 128 << 20, step: Step::Factor(2) });
    assert_eq!((p.repeats.iterations(8), p.repeats.warmup(8)), (50, 5));
    assert_eq!((p.dtypes, p.ops), (vec![DType::Bf16], vec![Some(ReduceOp::Average)]));
    assert_eq!((p.average, p.blocking, p.check, p.cycles), (Average::Max, Blocking::Barrier, 0, Some(3)));
    assert_eq!((p.aggregate, p.calls), (2, Calls::Started));
    let long =
        plan("reduce_scatter --minbytes 1M --maxbytes 4M --stepbytes 1M --warmup_iters 1 --agg_iters 1");
    assert_eq!(long.unwrap().repeats.sweep.sizes().count(), 4);
    // Of a flag that is given again the last holds.
    assert_eq!(plan("gather -N 0 -r 1").unwrap().cycles, None);
    let again = plan("send_recv -n 1 -b 8 -d half --one-way -n 7 --minbytes 64 -d float --one-way").unwrap();
    assert_eq!((again.repeats.iterations(8), again.repeats.sweep.begin), (7, 64));
    assert_eq!(again.dtypes, [DType::F32]);
    // A factor above 1 goes before a step.
    let step = |flags: &str| plan(&format!("all_reduce -b 8 -e 64M {flags}")).unwrap().repeats.sweep.step;
    assert_eq!(step("-f 2 -i 1M"), Step::Factor(2));
    assert_eq!(step("-f 1 -i 1M"), Step::Bytes(1 << 20));
}

#[test]
fn buffers_are_registered_where_that_can_be_unless_asked_not_to() {
    for (flags, on_hosts, over_nccl) in [("", true, false), ("-R 0", false, false)] {
        let p = plan(&format!("all_reduce {flags}")).unwrap();
        assert_eq!((p.registered(false), p.registered(true)), (on_hosts, over_nccl), "{flags}");
        crate::bench::device::check(&p).unwrap();
    }
    let asked = plan("all_reduce -R 1").unwrap();
    let e = crate::bench::device::check(&asked).unwrap_err();
    assert!(asked.registered(false) && e.code() == 2 && e.to_string().contains("take -R 0"), "{e}");
}

#[test]
fn defaults_sweep_from_a_kibibyte_to_64_mebibytes() {
    let p = plan("all_gather -o all -d all").unwrap();
    assert_eq!(p.repeats.sweep, Sweep { begin: 1024, end: 64 << 20, step: Step::Factor(4) });
    assert!(p.repeats.adaptive());
    assert_eq!((p.dtypes.len(), p.ops), (10, vec![None]));
    assert_eq!(plan("all_reduce -b 1G").unwrap().repeats.sweep.end, 1 << 30);
    for (flags, shown) in [
        ("send_recv", "sum"),
        ("send_recv -o max", "max"),
        ("send_recv -o all", "sum"),
        ("send_recv -o mulsum", "mulsum"),
        ("broadcast -o mulsum", "none"),
        ("all_to_all", "none"),
    ] {
        let p = plan(flags).unwrap();
        assert_eq!(p.ops.iter().map(|&op| p.op_name(op)).collect::<Vec<_>>(), [shown], "{flags}");
    }
    assert_eq!(plan("broadcast -r all").unwrap().roots(3), [Some(0), Some(1), Some(2)]);
    assert_eq!(plan("reduce -r -1").unwrap().roots(2), [Some(0), Some(1)]);
    assert_eq!(plan("all_to_all -r all").unwrap().roots(3), [None]);
    assert_eq!(plan("all_to_all -r -1").unwrap().roots(3), [None]);
}

#[test]
fn nonsense_is_named_with_its_flag() {
    for (flags, words) in [
        ("all_reduce -b 2M -e 1M", &["-e", "-b"][..]),
        ("all_reduce -b many", &["-b", "'many'"]),
        ("all_reduce -d f12", &["-d f12", "half (f16)", "bfloat16 (bf16)", "int8 (i8)", "all"]),
        ("all_reduce -o xor", &["-o xor", "sum"]),
        ("all_gather -o xor", &["-o xor", "sum"]),
        ("broadcast -r first", &["-r first", "all"]),
        ("all_reduce -a 4", &["-a 4", "0 to 3"]),
        ("all_reduce -z x", &["-z x", "0 to 3"]),
        ("all_reduce -n 0", &["-n 0"]),
        ("all_reduce -n 18446744073709551615", &["-n 18446744073709551615", "to 10000000"]),
        ("all_reduce -n 1.5", &["-n 1.5", "whole"]),
        ("all_reduce -w -1", &["-w -1", "whole"]),
        ("all_reduce -w 18446744073709551615", &["-w 18446744073709551615", "up to 10000000"]),
        ("all_reduce -c 10000001", &["-c 10000001", "up to 10000000"]),
        ("all_reduce -m 0", &["-m 0"]),
        ("all_reduce -m -2", &["-m -2", "from 1 to 1024"]),
        ("all_reduce -c -1", &["-c -1", "at least 0"]),
        ("broadcast -r -2", &["-r -2", "a rank such as 0"]),
        ("all_reduce -a -1", &["-a -1", "0 to 3"]),
        ("all_reduce -b -1", &["-b '-1'", "whole number of bytes"]),
        ("all_reduce -N 0 --json x", &["-N 0", "--json is of all rows", "give -N 1"]),
        ("all_reduce -N 0 --csv x", &["-N 0", "--csv is of all rows"]),
        ("all_reduce -N 0 --plot x.svg", &["-N 0", "--plot is of all rows"]),
        ("all_reduce -N 0 --min-busbw 1", &["-N 0", "--min-busbw is of all rows"]),
        ("all_reduce -N 0 -d all", &["-N 0", "-d all", "name one"]),
        ("all_reduce -N 0 -o all", &["-N 0", "-o all", "name one"]),
        ("broadcast -N 0 -r -1", &["-N 0", "-r all", "name one"]),
        ("all_reduce -N many", &["-N many", "0 to go on"]),
        ("all_reduce -R 2", &["-R 2", "symmetric", "leave it away"]),
        ("all_reduce -f 1.5", &["-f 1.5", "whole number", "-i"]),
        ("barrier -b many", &["-b", "'many'"]),
        ("all_reduce -f 1", &["-f 1", "-i"]),
        ("all_reduce -f 2 -i many", &["-i", "'many'"]),
        ("all_reduce --min-busbw nan", &["--min-busbw nan", "at least 0"]),
        ("all_reduce --min-busbw -1", &["--min-busbw -1", "at least 0"]),
        ("all_reduce --min-busbw fast", &["--min-busbw fast", "GB/s"]),
        ("all_reduce --algo ring", &["--algo ring", "pairwise", "auto", "native"]),
        ("send_recv --ping-pong -z 1", &["--ping-pong", "take -z 0, 2 or 3"]),
        ("send_recv --ping-pong -z 01", &["--ping-pong", "take -z 0, 2 or 3"]),
        ("send_recv --ping-pong -z 4", &["-z 4", "0 to 3"]),
    ] {
        let e = plan(flags).expect_err(flags);
        assert!(e.code() == 2 && words.iter().all(|w| e.to_string().contains(w)), "{flags}: {e}");
    }
    let e = plan("broadcast -r 2").unwrap().check(2, false).unwrap_err().to_string();
    assert!(e.contains("-r 2") && e.contains("2 ranks"), "{e}");
    let gate = |flags: &str, ranks| plan(flags).unwrap().check(ranks, false).map_err(|e| e.to_string());
    let e = gate("all_reduce --min-busbw 1", 1).unwrap_err();
    assert!(e.contains("all_reduce of one rank") && e.contains("take --ranks 2 or more"), "{e}");
    for (flags, ranks) in
        [("all_reduce --min-busbw 0", 1), ("broadcast --min-busbw 1", 1), ("all_reduce --min-busbw 1", 2)]
    {
        assert_eq!(gate(flags, ranks), Ok(()), "{flags}");
    }
    assert!(
        plan("all_reduce -b 6").unwrap().check(2, false).unwrap_err().to_string().contains("does not divide")
    );
}

#[test]
fn a_barrier_has_no_sizes_whatever_a_script_passes() {
    for flags in ["", "-b 5 -e 1", "-b 8 -e 128M -f 2", "-b 0 -e 1K"] {
        let p = plan(&format!("barrier {flags}")).unwrap();
        assert_eq!(p.repeats.sweep, Sweep::NOTHING, "{flags}");
        p.check(3, false).unwrap();
    }
}

#[test]
fn what_goes_by_bytes_is_refused_where_none_move() {
    for (flags, words) in [
        ("barrier --plot x.svg", ["--plot", "barrier has none"]),
        ("barrier --min-busbw 1", ["--min-busbw", "leave it away"]),
        ("all_reduce -b 0 -e 0 --plot x.svg", ["--plot", "raise -e"]),
        ("all_gather -b 0 -e 16 -i 4 --min-busbw 1", ["--min-busbw", "raise -e"]),
    ] {
        let e = plan(flags).unwrap().check(3, false).expect_err(flags);
        assert!(e.code() == 2 && words.iter().all(|w| e.to_string().contains(w)), "{flags}: {e}");
    }
    plan("all_gather -b 0 -e 64 -i 4 --min-busbw 1 --plot x.svg").unwrap().check(3, false).unwrap();
    let figure = |flags: &str| plan(&format!("{flags} --plot x.svg")).unwrap().check(3, false);
    figure("all_reduce -d all -o all").unwrap();
    let e = figure("reduce -d all -o all -r all").unwrap_err().to_string();
    assert!(e.contains("--plot: 150 lines") && e.ends_with("name one of -d, -o or -r"), "{e}");
    plan("barrier").unwrap().check(3, false).unwrap();
}

#[test]
fn types_go_by_several_names() {
    for (names, dtype) in [
        (["f16", "half", "fp16"], DType::F16),
        (["f32", "float", "fp32"], DType::F32),
        (["f64", "double", "fp64"], DType::F64),
    ] {
        assert!(names.iter().all(|name| dtypes(name).unwrap() == [dtype]), "{names:?}");
    }
}

#[test]
fn a_tuning_table_is_text_and_called_so() {
    let BenchCommand::Tune(args) = bench("tune").command else { panic!() };
    assert_eq!(args.out, std::path::Path::new("caravan-tuning.txt"));
}

#[test]
fn every_operation_is_a_command() {
    for operation in Operation::ALL {
        assert_eq!(plan(operation.name()).unwrap().operation, operation);
    }
    assert!(matches!(bench("alltoall").command, BenchCommand::AllToAll(_)));
}
