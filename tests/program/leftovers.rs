//! What is taken away where a file has a name before it is whole, as over NFS and Lustre: here, because without /proc no file can
//! be named later.

use crate::bench;
use harness::{signal, skip};
use rustix::process::Signal;
use std::fs;
use std::process::Command;

#[test]
fn a_signal_while_tokens_are_written_under_a_name_leaves_nothing() {
    let unmounted = ["-m", "mount", "-t", "tmpfs", "none", "/proc"];
    if !Command::new("unshare").args(unmounted).output().is_ok_and(|done| done.status.success()) {
        return skip("this takes a mount namespace of its own (unshare -m, as root) to do without /proc");
    }
    for name in [Signal::INT, Signal::TERM, Signal::HUP] {
        let bench = bench();
        bench.text("text.txt", 8000);
        assert!(Command::new("mkfifo").arg(bench.path("pipe")).status().unwrap().success());
        let tokenize = bench.command("tokenize --data text.txt pipe --out t.bin");
        let mut without = Command::new("unshare");
        without.args(["-m", "sh", "-c", "mount -t tmpfs none /proc && exec \"$0\" \"$@\""]);
        without.arg(tokenize.get_program()).args(tokenize.get_args());
        bench.prepare(&mut without);
        let run = without.spawn().unwrap();
        // Opening waits for the reader: the text's tokens are written by then, and the pipe's never come.
        let _writer = fs::OpenOptions::new().write(true).open(bench.path("pipe")).unwrap();
        let own = format!("-{}-0", run.id());
        let unfinished = |file: &String| file.starts_with("t.bin.tmp-") && file.ends_with(&own);
        assert!(bench.names().iter().any(unfinished), "{:?}", bench.names());
        signal(run.id(), name);
        assert_eq!(bench.finish(run).code, None);
        assert_eq!(bench.names(), ["pipe", "text.txt"], "{name:?}");
        bench.nothing_left();
    }
}
