// A run-time compiler (NVRTC) that accepts every program and compiles it to nothing.  A program keeps the names that
// it was asked for, since callers want their lowered form back.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <stdlib.h>
#include <string.h>

typedef int Result;

static const char nothing[] = "stalloc virtual GPU: a program compiled to nothing";

typedef struct Program {
    char *expressions[1024];
    int num_expressions;
    char *image; // NULL: nothing
} Program;

const char *nvrtcGetErrorString(Result error) {
    return error == SUCCESS ? "NVRTC_SUCCESS" : "NVRTC_ERROR_INVALID_INPUT";
}
Result nvrtcVersion(int *major, int *minor) {
    *major = gpu.cuda_version / 1000;
    *minor = gpu.cuda_version % 1000 / 10;
    return SUCCESS;
}

static const int architectures[] = {70, 75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};
enum { NUM_ARCHITECTURES = sizeof architectures / sizeof *architectures };

Result nvrtcGetNumSupportedArchs(int *num) {
    *num = NUM_ARCHITECTURES;
    return SUCCESS;
}
Result nvrtcGetSupportedArchs(int *list) {
    memcpy(list, architectures, sizeof architectures);
    return SUCCESS;
}
Result nvrtcCreateProgram(Program **program, const char *source) {
    *program = calloc(1, sizeof **program);
    if (!*program) return 1;
    (*program)->image = kernels_of_source(source);
    return SUCCESS;
}
Result nvrtcDestroyProgram(Program **program) {
    for (int i = 0; *program && i < (*program)->num_expressions; i++) free((*program)->expressions[i]);
    if (*program) free((*program)->image);
    free(*program);
    *program = NULL;
    return SUCCESS;
}
Result nvrtcCompileProgram(Program *program, int num_options, const char *const *options) { return SUCCESS; }
Result nvrtcAddNameExpression(Program *program, const char *expression) {
    if (program->num_expressions == 1024) return 1;
    program->expressions[program->num_expressions++] = strdup(expression);
    return SUCCESS;
}
Result nvrtcGetLoweredName(Program *program, const char *expression, const char **lowered) {
    for (int i = 0; i < program->num_expressions; i++) {
        if (strcmp(program->expressions[i], expression)) continue;
        *lowered = program->expressions[i];
        return SUCCESS;
    }
    return 10; // no such expression
}
static Result code_size(const Program *program, size_t *size) {
    *size = program->image ? strlen(program->image) + 1 : sizeof nothing;
    return SUCCESS;
}
static Result code(const Program *program, char *into) {
    strcpy(into, program->image ? program->image : nothing);
    return SUCCESS;
}
Result nvrtcGetPTXSize(Program *program, size_t *size) { return code_size(program, size); }
Result nvrtcGetPTX(Program *program, char *into) { return code(program, into); }
Result nvrtcGetCUBINSize(Program *program, size_t *size) { return code_size(program, size); }
Result nvrtcGetCUBIN(Program *program, char *into) { return code(program, into); }
Result nvrtcGetLTOIRSize(Program *program, size_t *size) { return code_size(program, size); }
Result nvrtcGetLTOIR(Program *program, char *into) { return code(program, into); }
Result nvrtcGetNVVMSize(Program *program, size_t *size) { return code_size(program, size); }
Result nvrtcGetNVVM(Program *program, char *into) { return code(program, into); }
Result nvrtcGetProgramLogSize(Program *program, size_t *size) {
    *size = 1;
    return SUCCESS;
}
Result nvrtcGetProgramLog(Program *program, char *into) {
    *into = 0;
    return SUCCESS;
}
