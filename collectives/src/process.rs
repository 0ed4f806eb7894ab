//! What the kernel says of a process.

use rustix::process::Pid;

/// Of one that can be seen from here.
pub(crate) struct Stat {
    pub name: String,
    pub parent: Option<Pid>,
    /// It has ended, also when nobody has reaped it yet.
    pub ended: bool,
    /// When it started, in the kernel's own count.
    pub start: String,
}

impl Stat {
    pub fn of(pid: u32) -> Option<Stat> {
        let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
        // The name stands in parentheses and may hold anything, also some of them, or be cut within a letter; fields are counted
        // from behind it.
        let stat = String::from_utf8_lossy(&stat);
        let (before, after) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = after.split_whitespace().collect();
        Some(Stat {
            name: before.split_once('(')?.1.to_owned(),
            parent: Pid::from_raw(fields.get(1)?.parse().ok()?),
            ended: matches!(*fields.first()?, "Z" | "X" | "x"),
            start: (*fields.get(19)?).to_owned(),
        })
    }
}
