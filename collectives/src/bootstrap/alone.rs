//! Tests that change something of their whole process, such as its limits, have a process of their own.

/// False once the test of this path has passed by itself in another process, where this is true.
pub(super) fn alone(test: &str) -> bool {
    const ALONE: &str = "CARAVAN_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut again = std::process::Command::new(std::env::current_exe().expect("the test's own path"));
    let output = again.args([test, "--exact"]).env(ALONE, "1").output().expect("another process");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    false
}
