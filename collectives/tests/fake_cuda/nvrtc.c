/* A compiler of kernels: its machine code is their text. It is of the time before 12.0. FAKE_NVRTC_REFUSE=NAME.cu refuses to
 * compile that one, and FAKE_NVRTC_REFUSE=* any. Compiled with -DKNOWS=120 it knows that architecture and one of old. */
#include "check.h"

typedef struct { int kind, refused; char *code; } Program;
enum { PROGRAM = 0x99 };

static Program *live(void *p) {
    CHECK(p && ((Program *)p)->kind == PROGRAM);
    return p;
}

/* A version that there is not, so that no cache of kernels takes this code for another's. */
int nvrtcVersion(int *major, int *minor) { *major = 13, *minor = 999; return 0; }
#ifdef KNOWS
static const int known[] = {80, KNOWS};
#else
static const int known[] = {75, 80, 86, 87, 89, 90, 100};
#endif
enum { KNOWN = sizeof known / sizeof *known };
int nvrtcGetNumSupportedArchs(int *count) { *count = KNOWN; return 0; }
int nvrtcGetSupportedArchs(int *numbers) { memcpy(numbers, known, sizeof known); return 0; }
int nvrtcCreateProgram(void **made, const char *text, const char *name, int count, const char *const *headers,
                       const char *const *names) {
    CHECK(strstr(name, ".cu") && strstr(text, "#include"));
    for (int i = 0; i < count; i++) CHECK(strstr(headers[i], "#pragma once") && strstr(names[i], ".cuh"));
    Program *p = calloc(1, sizeof *p);
    p->kind = PROGRAM;
    const char *refuse = getenv("FAKE_NVRTC_REFUSE");
    p->refused = refuse && (!strcmp(refuse, "*") || !strcmp(refuse, name));
    p->code = malloc(sizeof FAKE_CODE + strlen(text));
    strcat(strcpy(p->code, FAKE_CODE), text);
    *made = p;
    return 0;
}
int nvrtcDestroyProgram(void **p) { free(live(*p)->code); free(*p); *p = NULL; return 0; }
int nvrtcCompileProgram(void *p, int count, const char *const *options) {
    int elements = 0;
    const char *chosen = getenv("FAKE_CUDA_CAPABILITY"), *machine = "--gpu-architecture=sm_";
    CHECK(live(p)->code && count > 0 && !strncmp(options[0], machine, strlen(machine)));
    chosen = chosen ? chosen : "90a";
    CHECK(!strncmp(options[0] + strlen(machine), chosen, strlen(chosen)));
    for (int i = 0; i < count; i++) elements += !strncmp(options[i], "-DELEMENT=", 10);
    CHECK(elements == 1);
    return live(p)->refused ? 6 : 0;
}
int nvrtcGetProgramLogSize(void *p, size_t *size) { CHECK(live(p)); *size = 1; return 0; }
int nvrtcGetProgramLog(void *p, char *log) { CHECK(live(p)); *log = 0; return 0; }
int nvrtcGetCUBINSize(void *p, size_t *size) { *size = strlen(live(p)->code) + 1; return 0; }
int nvrtcGetCUBIN(void *p, char *code) { strcpy(code, live(p)->code); return 0; }
const char *nvrtcGetErrorString(int status) { (void)status; return "a fake error"; }
