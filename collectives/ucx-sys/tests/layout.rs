//! Compares sizes, offsets and constants with the installed header by compiling a C program against it.

use std::mem::offset_of;
use std::process::Command;
use ucx_sys::*;

/// How the C program begins: it is refused if a handler of logs has another type than ours.
const START: &str = "\
#include <ucp/api/ucp.h>
#include <ucs/debug/log_def.h>
#include <stddef.h>
#include <stdio.h>
static ucs_log_func_rc_t hear(const char *file, unsigned line, const char *function, ucs_log_level_t level,
                              const ucs_log_component_config_t *component, const char *message, va_list arguments) {
    return UCS_LOG_FUNC_RC_STOP;
}
int main(void) {
    void (*push)(ucs_log_func_t) = ucs_log_push_handler;
    ucs_log_func_t handler = hear;
    (void)push, (void)handler;
";

/// What the C program prints, computed here: one `name value` a line.
macro_rules! facts {
    (structs { $($s:ident { $($f:ident),* })* } constants { $($c:ident),* }) => {
        fn ours() -> Vec<(String, i64)> {
            let mut out = Vec::new();
            $(
                out.push((format!("sizeof {}", stringify!($s)), size_of::<$s>() as i64));
                $(out.push((format!("{}.{}", stringify!($s), stringify!($f)), offset_of!($s, $f) as i64));)*
            )*
            $(out.push((stringify!($c).to_string(), $c as i64));)*
            out
        }

        fn program() -> String {
            let mut c = START.to_string();
            $(
                c += concat!("printf(\"sizeof ", stringify!($s), "=%ld\\n\", (long)sizeof(", stringify!($s), "));\n");
                $(c += concat!("printf(\"", stringify!($s), ".", stringify!($f), "=%ld\\n\", (long)offsetof(",
                    stringify!($s), ", ", stringify!($f), "));\n");)*
            )*
            $(c += concat!("printf(\"", stringify!($c), "=%ld\\n\", (long)(", stringify!($c), "));\n");)*
            c + "printf(\"sizeof status=%ld\\n\", (long)sizeof(ucs_status_t));\nreturn 0;\n}\n"
        }
    };
}

facts! {
    structs {
        ucp_params_t { field_mask, features, request_size, request_init, request_cleanup, tag_sender_mask,
            mt_workers_shared, estimated_num_eps, estimated_num_ppn, name }
        ucp_worker_params_t { field_mask, thread_mode, cpu_mask, events, user_data, event_fd, flags, name,
            am_alignment, client_id }
        ucp_err_handler_t { cb, arg }
        ucs_sock_addr_t { addr, addrlen }
        ucp_ep_params_t { field_mask, address, err_mode, err_handler, user_data, flags, sockaddr, conn_request,
            name, local_sockaddr }
        ucp_tag_recv_info_t { sender_tag, length }
        ucp_request_param_t { op_attr_mask, flags, request, cb, datatype, user_data, reply_buffer, memory_type,
            recv_info, memh }
    }
    constants {
        UCS_LOG_LEVEL_FATAL, UCS_LOG_FUNC_RC_STOP, UCS_LOG_FUNC_RC_CONTINUE,
        UCS_OK, UCS_INPROGRESS, UCS_ERR_MESSAGE_TRUNCATED, UCS_ERR_CANCELED, UCS_ERR_LAST,
        UCP_PARAM_FIELD_FEATURES, UCP_PARAM_FIELD_TAG_SENDER_MASK, UCP_PARAM_FIELD_ESTIMATED_NUM_EPS, UCP_FEATURE_TAG,
        UCP_WORKER_PARAM_FIELD_THREAD_MODE, UCP_WORKER_PARAM_FIELD_FLAGS, UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK,
        UCS_THREAD_MODE_SERIALIZED, UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
        UCP_EP_PARAM_FIELD_ERR_HANDLER, UCP_ERR_HANDLING_MODE_NONE, UCP_ERR_HANDLING_MODE_PEER,
        UCP_EP_CLOSE_FLAG_FORCE, UCP_OP_ATTR_FIELD_FLAGS, UCP_OP_ATTR_FIELD_MEMORY_TYPE, UCP_OP_ATTR_FLAG_NO_IMM_CMPL,
        UCP_OP_ATTR_FLAG_FAST_CMPL, UCS_MEMORY_TYPE_HOST
    }
}

#[test]
fn layouts_and_constants_are_those_of_the_header() {
    if !std::path::Path::new("/usr/include/ucp/api/ucp.h").exists() {
        return harness::skip("/usr/include/ucp/api/ucp.h is not there (Debian: libucx-dev)");
    }
    // Which the build of any Rust program needs as its linker.
    let bench = harness::Bench::new("cc");
    bench.file("layout.c", program());
    bench.run("-Werror -o layout layout.c -lucs").success();
    let mut layout = Command::new(bench.path("layout"));
    bench.prepare(&mut layout);
    let theirs: Vec<(String, i64)> = bench
        .outcome(&mut layout)
        .success()
        .stdout
        .lines()
        .map(|line| line.split_once('=').unwrap())
        .map(|(name, value)| (name.to_string(), value.parse().unwrap()))
        .collect();
    let mut expected = ours();
    expected.push(("sizeof status".into(), size_of::<ucs_status_t>() as i64));
    // Newer headers append fields to these; what is ours must be where it was, and the masks guard the rest.
    for ((name, mine), (their_name, their)) in expected.iter().zip(&theirs) {
        assert_eq!(name, their_name);
        if name.starts_with("sizeof ucp_") {
            assert!(mine <= their, "{name}: {mine} here, {their} in the header");
        } else {
            assert_eq!(mine, their, "{name}");
        }
    }
    assert_eq!(expected.len(), theirs.len());
    assert!(expected.len() > 60);
}

#[test]
fn a_missing_library_is_explained() {
    let error = Ucp::load_from("libucp-of-nobody.so.0").err().expect("no such library");
    assert!(error.contains("libucp-of-nobody.so.0") && error.contains("libucx0"), "{error}");
    // A library that is there but is not UCX.
    let error = Ucp::load_from("libc.so.6").err().expect("libc is not UCX");
    assert!(error.contains("libucs") || error.contains("not UCX"), "{error}");
}

#[test]
fn the_installed_library_loads_and_speaks() {
    match Ucp::load().map(|ucp| (ucp.version(), ucp.status(UCS_ERR_CANCELED))) {
        Err(why) => harness::skip(&why),
        Ok((version, said)) => {
            assert!(version >= (OLDEST.0, OLDEST.1, 0));
            assert_eq!(said, "Request canceled");
            // Nobody has it any more, and other threads may be in it.
            assert!(ucx_sys::loaded_log_push_handler().is_some(), "it stays loaded");
        }
    }
}
