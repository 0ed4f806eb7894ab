# Where tests/run and .ci/run look for libraries and headers; both read this file.
# shellcheck shell=bash disable=SC2034

# Names of libclang, which bindings to MPI are made with.
libclang=('libclang.so*' 'libclang-[0-9]*.so*')

# found NAME...: whether something of one of these names is there. Some of the folders may be links, which find enters so.
found() {
    local name
    for name; do
        [ -z "$(find /usr/lib/ /usr/lib64/ /lib64/ /usr/include/ /usr/local/ /opt/ -name "$name" -print -quit 2>/dev/null)" ] || return 0
    done
    return 1
}

# can_build_for MPICC: whether what speaks to MPI can be built by this compiler.
can_build_for() {
    command -v "$1" >/dev/null && found "${libclang[@]}"
}
