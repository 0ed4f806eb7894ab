//! What the crate promises, seen from outside: every transport, alone, inside and between nodes, and what is said when
//! ranks fail. One program, because each takes its time to link; ranks that are processes are this program again.

mod delays;
mod device;
mod failures;
mod launchers;
mod links;
mod nodes;
mod pages;
mod panics;
mod parts;
mod protocol;
mod ranks;
mod rendezvous;
mod scratch;
mod shm;
mod threads;
mod ucx;
mod ucx_groups;
mod ucx_processes;
