//! Tells the program which compiler built it, for the run line of metrics and for doctor.

use std::process::Command;

fn main() {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = Command::new(rustc).arg("--version").output();
    let version = version.map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned()).unwrap_or_default();
    println!("cargo::rustc-env=CARAVAN_RUSTC={version}");
    println!("cargo::rerun-if-changed=build.rs");
}
