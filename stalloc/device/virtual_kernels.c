// What kernels access that were compiled at run time, as CuPy's are: by their parameters, which their source declares.
//
// A compiled program is the list of its kernels' parameters.  An array is a CArray of CuPy's (its address, size, shape
// and strides), or a bare pointer, of which the first byte stands for all; what is not const is taken to be written.
#define _GNU_SOURCE
#include "virtual_gpu.h"
#include "virtual_order.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char start_of_image[] = "stalloc virtual GPU: the kernels ";

enum { MOST_PARAMETERS = 64, NUM_BUCKETS = 1024 };
typedef struct {
    int position, how, num_dimensions; // -1: a pointer
    bool is_contiguous;
    size_t item_bytes;
} Array;
typedef struct Kernel { // or a module, which has only an image
    void *handle;
    struct Kernel *next;
    const char *image;
    int num;
    Array arrays[MOST_PARAMETERS];
} Kernel;
static Kernel *kernels[NUM_BUCKETS]; // under kernels_lock; what is there stays
static pthread_mutex_t kernels_lock = PTHREAD_MUTEX_INITIALIZER;
FREE_AT_FORK(kernels_lock)

static const char *matching_bracket(const char *open) {
    int depth = 0;
    for (const char *at = open; *at; at++) {
        depth += *at == '(';
        depth -= *at == ')';
        if (!depth) return at;
    }
    return NULL;
}

// The image of a program: "name(parameters)" of each kernel that its source declares; NULL where nobody looks at it.
char *kernels_of_source(const char *source) {
    if (order_level < ORDER_STRICT || !source) return NULL;
    char *image = malloc(sizeof start_of_image + 2 * strlen(source)), *into = image;
    if (!image) return NULL;
    into += sprintf(into, "%s", start_of_image);
    for (const char *at = strstr(source, "__global__"); at; at = strstr(at, "__global__")) {
        at += strlen("__global__");
        const char *open = strchr(at, '(');
        const char *bounds = strstr(at, "__launch_bounds__");
        if (open && bounds && bounds < open) {
            const char *close = matching_bracket(open);
            open = close ? strchr(close, '(') : NULL;
        }
        const char *close = open ? matching_bracket(open) : NULL;
        if (!close) break;
        const char *name = open;
        while (name > at && isspace((unsigned char)name[-1])) name--;
        while (name > at && (isalnum((unsigned char)name[-1]) || name[-1] == '_')) name--;
        into += sprintf(into, "%.*s\n", (int)(close + 1 - name), name);
    }
    return image;
}

static size_t item_bytes_of(const char *type) {
    static const struct {
        const char *name;
        size_t bytes;
    } sizes[] = {{"complex<double", 16}, {"complex<float", 8}, {"long long", 8}, {"unsigned long long", 8},
                 {"double", 8},          {"size_t", 8},        {"int", 4},       {"unsigned int", 4},
                 {"float16", 2},         {"float", 4},         {"short", 2},     {"unsigned short", 2}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (!strncmp(type, sizes[i].name, strlen(sizes[i].name))) return sizes[i].bytes;
    return 1;
}

// Of "CArray<T, dimensions, contiguous, ...>"; a type may have arguments of its own.
static bool describe_array(const char *type, Array *array) {
    array->item_bytes = item_bytes_of(type);
    int depth = 0;
    while (*type && (depth || *type != ',')) {
        depth += *type == '<';
        depth -= *type++ == '>';
    }
    char is_contiguous[2]; // 1 or true, as cupyx.jit writes it
    bool is_known = sscanf(type, ", %d, %1s", &array->num_dimensions, is_contiguous) == 2;
    array->is_contiguous = is_known && strchr("1t", *is_contiguous);
    return is_known && array->num_dimensions >= 0 && array->num_dimensions <= MOST_DIMENSIONS;
}

static void describe_parameter(Kernel *kernel, int position, const char *text, size_t length) {
    char parameter[512];
    snprintf(parameter, sizeof parameter, "%.*s", (int)length, text);
    const char *array = strstr(parameter, "CArray<"), *star = strrchr(parameter, '*');
    const char *constant = strstr(parameter, "const");
    if ((!array && !star) || kernel->num == MOST_PARAMETERS) return;
    bool is_constant = constant && (array ? constant < array : constant < star);
    Array one = {position, is_constant ? READS : WRITES, -1, true, 1};
    if (array && !describe_array(array + strlen("CArray<"), &one)) return;
    kernel->arrays[kernel->num++] = one;
}

static Kernel *find(void *handle) {
    Kernel *kernel = kernels[(uintptr_t)handle / 16 % NUM_BUCKETS];
    while (kernel && kernel->handle != handle) kernel = kernel->next;
    return kernel;
}

static Kernel *add(void *handle) {
    Kernel *kernel = calloc(1, sizeof *kernel), **bucket = &kernels[(uintptr_t)handle / 16 % NUM_BUCKETS];
    if (!kernel) abort();
    kernel->handle = handle;
    kernel->next = *bucket;
    return *bucket = kernel;
}

void kernels_loaded(void *module, const void *image) {
    if (order_level < ORDER_STRICT || !image || strncmp(image, start_of_image, sizeof start_of_image - 1)) return;
    pthread_mutex_lock(&kernels_lock);
    add(module)->image = strdup(image);
    pthread_mutex_unlock(&kernels_lock);
}

// Where an image has the parameters of a kernel, from their bracket on.  The name may have namespaces and, of a template,
// arguments, which the image has not.
static const char *parameters_of(const char *image, const char *name) {
    size_t length = strcspn(name, "<");
    for (size_t i = length; i > 0; i--)
        if (name[i - 1] == ':') {
            name += i;
            length -= i;
            break;
        }
    for (const char *at = image + sizeof start_of_image - 1; *at; at += strcspn(at, "\n") + 1)
        if (!strncmp(at, name, length) && at[length] == '(') return at + length;
    return NULL;
}

void kernel_found(void *function, void *module, const char *name) {
    if (order_level < ORDER_STRICT) return;
    pthread_mutex_lock(&kernels_lock);
    Kernel *loaded = find(module);
    const char *open = loaded ? parameters_of(loaded->image, name) : NULL;
    const char *close = open ? matching_bracket(open) : NULL;
    if (close) {
        Kernel *kernel = add(function);
        int depth = 0, position = 0;
        for (const char *end = open + 1, *begin = end; end <= close; end++) {
            depth += *end == '<';
            depth -= *end == '>';
            if (end < close && (*end != ',' || depth)) continue;
            describe_parameter(kernel, position++, begin, (size_t)(end - begin));
            begin = end + 1;
        }
    }
    pthread_mutex_unlock(&kernels_lock);
}

typedef struct {
    char *address;
    ptrdiff_t size;
    ptrdiff_t shape_and_strides[]; // strides in bytes
} CArray;

static void access_array(void *stream, const Array *array, const CArray *of) {
    int num = array->is_contiguous ? 0 : array->num_dimensions;
    size_t piece_bytes = array->is_contiguous ? (size_t)of->size * array->item_bytes : array->item_bytes;
    const ptrdiff_t *shape = of->shape_and_strides, *strides = shape + num;
    order_access_strided(stream, &(Strided){of->address, piece_bytes, num, shape, strides}, array->how);
}

void kernel_launched(void *function, void *stream, void **parameters) {
    if (order_level < ORDER_STRICT || !parameters) return;
    pthread_mutex_lock(&kernels_lock);
    const Kernel *kernel = find(function);
    pthread_mutex_unlock(&kernels_lock);
    for (int writes = 0; kernel && writes < 2; writes++) // what it reads first: a kernel may do both to one array
        for (int i = 0; i < kernel->num; i++) {
            const Array *array = &kernel->arrays[i];
            if ((array->how == WRITES) != writes) continue;
            void *value = parameters[array->position];
            if (array->num_dimensions >= 0) access_array(stream, array, value);
            else order_access(stream, *(void **)value, 1, array->how);
        }
}
