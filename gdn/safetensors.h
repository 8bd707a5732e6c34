// safetensors.h: the safetensors file format, read strictly and written in place.
//
// A file is 8 bytes little-endian header length n, n bytes of JSON {"name": {"dtype","shape","data_offsets"}, ...,
// "__metadata__": {...}} and then the tensors, whose offsets count from the end of the header
// (https://github.com/huggingface/safetensors). A file is accepted only when the tensors cover the rest of the file
// exactly, without holes or overlaps. For writing, the layout comes first, so that any tensor's place in the file is
// known and several writers can fill it in any order.
//
// defines: Safetensors, SafetensorsTensor, DType, dtype_name, dtype_size, safetensors_parse_header, safetensors_open,
//          safetensors_find, safetensors_free, safetensors_read, safetensors_add, safetensors_build_header
#ifndef GDN_SAFETENSORS_H
#define GDN_SAFETENSORS_H

#include "json.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "checkpoints are little-endian: this machine is not"
#endif

typedef enum { DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_OTHER } DType;
enum { SAFETENSORS_MAX_DIMS = 8, SAFETENSORS_MAX_HEADER = 100 * 1000 * 1000 };  // the bound of the format's own library

typedef struct {
  char *name;
  DType dtype;
  int bytes;  // of an element; 0 for types that are not read
  int ndim;
  int64_t shape[SAFETENSORS_MAX_DIMS];
  int64_t count;
  int64_t begin, end;  // bytes from the start of the file
} SafetensorsTensor;

typedef struct {
  SafetensorsTensor *tensors;  // in file order
  int64_t n, capacity;
  int64_t data_start;  // 8 + header length
  int64_t file_size;
  int fd;  // -1 when not open
  char path[PATH_SIZE];
} Safetensors;

static inline const char *dtype_name(DType t) { return t == DTYPE_F32 ? "F32" : t == DTYPE_F16 ? "F16" : "BF16"; }

// Bytes of an element by the format's name of the type, 0: unknown.
static inline int dtype_size(const char *name, DType *type) {
  static const struct {
    const char *name;
    int size;
  } sizes[] = {{"F32", 4}, {"F16", 2}, {"BF16", 2}, {"F64", 8}, {"I64", 8},  {"I32", 4},     {"I16", 2},    {"I8", 1},
               {"U8", 1},  {"U16", 2}, {"U32", 4},  {"U64", 8}, {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    if (!strcmp(name, sizes[i].name)) {
      *type = i < 3 ? (DType)i : DTYPE_OTHER;
      return sizes[i].size;
    }
  return 0;
}

static inline void safetensors_free(Safetensors *f) {
  for (int64_t i = 0; i < f->n; i++) free(f->tensors[i].name);
  free(f->tensors);
  f->tensors = NULL, f->n = f->capacity = 0;
  if (f->fd >= 0) close(f->fd);
  f->fd = -1;
}

// A new tensor at the end, zeroed but for its name; NULL: no memory.
static inline SafetensorsTensor *safetensors_append(Safetensors *f, const char *name) {
  if (f->n == f->capacity) {
    int64_t capacity = f->capacity ? 2 * f->capacity : 64;
    void *p = realloc(f->tensors, (size_t)capacity * sizeof(SafetensorsTensor));
    if (!p) return NULL;
    f->tensors = (SafetensorsTensor *)p, f->capacity = capacity;
  }
  SafetensorsTensor *t = &f->tensors[f->n];
  memset(t, 0, sizeof *t);
  size_t size = strlen(name) + 1;
  t->name = (char *)malloc(size);
  if (!t->name) return NULL;
  memcpy(t->name, name, size);
  f->n++;
  return t;
}

// ----------------------------------------------------------------------------
// reading

static inline int safetensors_compare(const void *a, const void *b) {
  const SafetensorsTensor *x = (const SafetensorsTensor *)a, *y = (const SafetensorsTensor *)b;
  if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
  return x->end < y->end ? -1 : x->end > y->end;
}

// One entry of the header into the list.
static inline int safetensors_parse_tensor(Safetensors *f, const char *name, const json_t *v, Error *err) {
#define BAD(...) return error_set(err, EXIT_CHECKPOINT, __VA_ARGS__)
  const json_t *shape = json_object_get(v, "shape"), *offsets = json_object_get(v, "data_offsets");
  const char *dtype = json_string_value(json_object_get(v, "dtype"));
  if (!json_is_object(v) || !dtype || !json_is_array(shape) || !json_is_array(offsets) || json_array_size(offsets) != 2)
    BAD("%s: tensor %.200s: needed dtype, shape and two data_offsets", f->path, name);
  if (json_array_size(shape) > SAFETENSORS_MAX_DIMS)
    BAD("%s: tensor %.200s has %zu dimensions: needed at most %d", f->path, name, json_array_size(shape),
        SAFETENSORS_MAX_DIMS);
  SafetensorsTensor *t = safetensors_append(f, name);
  if (!t) return error_set(err, EXIT_MEMORY, "%s: no memory for its header", f->path);
  if (!(t->bytes = dtype_size(dtype, &t->dtype))) BAD("%s: tensor %.200s: unknown dtype %.40s", f->path, name, dtype);
  t->ndim = (int)json_array_size(shape);
  t->count = 1;
  int64_t bytes = 0;
  for (int i = 0; i < t->ndim; i++) {
    const json_t *d = json_array_get(shape, (size_t)i);
    t->shape[i] = json_integer_value(d);
    if (!json_is_integer(d) || t->shape[i] < 0 || __builtin_mul_overflow(t->count, t->shape[i], &t->count))
      BAD("%s: tensor %.200s: its shape is not one", f->path, name);
  }
  const json_t *b = json_array_get(offsets, 0), *e = json_array_get(offsets, 1);
  int64_t begin = json_integer_value(b), end = json_integer_value(e), room = f->file_size - f->data_start;
  if (!json_is_integer(b) || !json_is_integer(e) || begin < 0 || end < begin || end > room)
    BAD("%s: tensor %.200s: data_offsets %lld to %lld, needed inside the %lld bytes of data", f->path, name,
        (long long)begin, (long long)end, (long long)room);
  if (__builtin_mul_overflow(t->count, (int64_t)t->bytes, &bytes) || bytes != end - begin)
    BAD("%s: tensor %.200s: %lld bytes of data for %lld elements of %s", f->path, name, (long long)(end - begin),
        (long long)t->count, dtype);
  t->begin = f->data_start + begin, t->end = f->data_start + end;
  return 0;
#undef BAD
}

// Parses the first `size` bytes of a file of `file_size` bytes; they must hold the whole header. Accepts any bytes
// without harm. f->path must be set (for messages); call safetensors_free afterwards whatever the result.
static inline int safetensors_parse_header(const uint8_t *data, size_t size, uint64_t file_size, Safetensors *f,
                                           Error *err) {
  f->tensors = NULL, f->n = f->capacity = 0;
  if (file_size < 8 || size < 8 || file_size > INT64_MAX)
    return error_set(err, EXIT_CHECKPOINT, "%s: %llu bytes are too short for a safetensors file", f->path,
                     (unsigned long long)file_size);
  uint64_t header = 0;
  for (int i = 0; i < 8; i++) header |= (uint64_t)data[i] << (8 * i);
  if (header > SAFETENSORS_MAX_HEADER || header > file_size - 8)
    return error_set(err, EXIT_CHECKPOINT,
                     "%s: header of %llu bytes in a file of %llu: not a safetensors file or cut off", f->path,
                     (unsigned long long)header, (unsigned long long)file_size);
  if (header > size - 8) return error_set(err, EXIT_CHECKPOINT, "%s: the header is cut off", f->path);
  f->data_start = 8 + (int64_t)header, f->file_size = (int64_t)file_size;
  json_t *j = json_parse((const char *)data + 8, (size_t)header, f->path, EXIT_CHECKPOINT, err);
  if (!j) return EXIT_CHECKPOINT;
  const char *name;
  json_t *v;
  int rc = 0;
  json_object_foreach(j, name, v) {
    if (!rc && strcmp(name, "__metadata__")) rc = safetensors_parse_tensor(f, name, v, err);
  }
  json_decref(j);
  if (rc) return rc;
  if (f->n) qsort(f->tensors, (size_t)f->n, sizeof *f->tensors, safetensors_compare);
  int64_t at = f->data_start;
  for (int64_t i = 0; i < f->n; at = f->tensors[i++].end)
    if (f->tensors[i].begin != at)
      return error_set(err, EXIT_CHECKPOINT,
                       "%s: tensor %.200s begins at byte %lld, needed %lld (an overlap or a hole)", f->path,
                       f->tensors[i].name, (long long)f->tensors[i].begin, (long long)at);
  if (at != f->file_size)
    return error_set(err, EXIT_CHECKPOINT, "%s: the file has %lld bytes, its header describes %lld", f->path,
                     (long long)f->file_size, (long long)at);
  return 0;
}

// Opens a file and reads its header. On success the file stays open for safetensors_read; safetensors_free closes it.
static inline int safetensors_open(Safetensors *f, const char *path, Error *err) {
  memset(f, 0, sizeof *f);
  snprintf(f->path, sizeof f->path, "%s", path);
  int64_t file_size = 0;
  f->fd = file_open(path, &file_size, EXIT_CHECKPOINT, err);
  if (f->fd < 0) return EXIT_CHECKPOINT;
  uint8_t head[8] = {0};
  size_t size = file_size < 8 ? (size_t)file_size : 8;
  uint8_t *data = head;
  int rc = 0;
  if (file_pread(f->fd, head, size, 0)) rc = error_set(err, EXIT_CHECKPOINT, "%s: cannot be read", path);
  uint64_t header = 0;
  for (int i = 0; i < 8; i++) header |= (uint64_t)head[i] << (8 * i);
  if (!rc && size == 8 && header <= SAFETENSORS_MAX_HEADER && (int64_t)header <= file_size - 8) {
    size = 8 + (size_t)header;
    data = (uint8_t *)malloc(size);
    if (!data)
      rc = error_set(err, EXIT_MEMORY, "%s: no memory for a header of %zu bytes", path, size);
    else if (file_pread(f->fd, data, size, 0))
      rc = error_set(err, EXIT_CHECKPOINT, "%s: cannot be read", path);
  }
  if (!rc) rc = safetensors_parse_header(data, size, (uint64_t)file_size, f, err);
  if (data != head) free(data);
  if (rc) safetensors_free(f);
  return rc;
}

static inline const SafetensorsTensor *safetensors_find(const Safetensors *f, const char *name) {
  for (int64_t i = 0; i < f->n; i++)
    if (!strcmp(f->tensors[i].name, name)) return &f->tensors[i];
  return NULL;
}

static inline float float_from_bf16(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static inline float float_from_f16(uint16_t h) {
  int exponent = (h >> 10) & 31, mantissa = h & 1023;
  float x = exponent == 31 ? (mantissa ? NAN : INFINITY)
            : exponent     ? ldexpf((float)(mantissa | 1024), exponent - 25)
                           : ldexpf((float)mantissa, -24);
  return h & 0x8000 ? -x : x;
}

// Elements first .. first+count-1 of a tensor of an open file, as float.
static inline int safetensors_read(const Safetensors *f, const SafetensorsTensor *t, int64_t first, int64_t count,
                                   float *dst, Error *err) {
  if (t->dtype == DTYPE_OTHER)
    return error_set(err, EXIT_CHECKPOINT, "%s: tensor %s: needed F32, BF16 or F16", f->path, t->name);
  // half-width elements are read into the upper half of dst and widened from the front
  char *raw = (char *)dst + count * (4 - t->bytes);
  if (file_pread(f->fd, raw, (size_t)(count * t->bytes), t->begin + first * t->bytes))
    return error_set(err, EXIT_CHECKPOINT, "%s: tensor %s cannot be read: %s", f->path, t->name,
                     errno ? strerror(errno) : "the file became shorter");
  for (int64_t i = 0; t->bytes == 2 && i < count; i++) {
    uint16_t h;
    memcpy(&h, raw + 2 * i, 2);
    dst[i] = t->dtype == DTYPE_BF16 ? float_from_bf16(h) : float_from_f16(h);
  }
  return 0;
}

// ----------------------------------------------------------------------------
// writing

// Adds a float tensor behind the others of a layout (zero the struct and set fd = -1 before the first).
static inline void safetensors_add(Safetensors *f, const char *name, int ndim, const int64_t *shape) {
  SafetensorsTensor *t = safetensors_append(f, name);
  if (!t) fail(EXIT_MEMORY, "no memory for the layout of a checkpoint");
  t->dtype = DTYPE_F32, t->bytes = 4, t->ndim = ndim, t->count = 1;
  for (int i = 0; i < ndim; i++) t->shape[i] = shape[i], t->count *= shape[i];
}

// The header of a finished layout (8 length bytes and JSON, free() it); fills in the offsets, data_start and file_size.
static inline char *safetensors_build_header(Safetensors *f, size_t *size) {
  json_t *root = json_object(), *meta = json_pack("{s:s}", "format", "pt");
  int bad = json_object_set_new(root, "__metadata__", meta);
  int64_t at = 0;
  for (int64_t i = 0; i < f->n; i++) {
    SafetensorsTensor *t = &f->tensors[i];
    json_t *shape = json_array();
    for (int k = 0; k < t->ndim; k++) bad |= json_array_append_new(shape, json_integer(t->shape[k]));
    t->begin = at, at += 4 * t->count;
    bad |= json_object_set_new(root, t->name,
                               json_pack("{s:s, s:o, s:[I, I]}", "dtype", "F32", "shape", shape, "data_offsets",
                                         (json_int_t)t->begin, (json_int_t)at));
  }
  char *text = bad ? NULL : json_print(root, JSON_COMPACT);
  json_decref(root);
  if (!text) fail(EXIT_MEMORY, "no memory for the header of a checkpoint");
  size_t length = strlen(text), padded = (length + 7) / 8 * 8;  // the data begin at a multiple of 8
  char *header = (char *)alloc_array((int64_t)padded + 9, 1, "header of a checkpoint");
  for (int i = 0; i < 8; i++) header[i] = (char)(uint8_t)((uint64_t)padded >> (8 * i));
  memcpy(header + 8, text, length);
  memset(header + 8 + length, ' ', padded - length);
  free(text);
  f->data_start = 8 + (int64_t)padded, f->file_size = f->data_start + at;
  for (int64_t i = 0; i < f->n; i++) {
    f->tensors[i].begin += f->data_start;
    f->tensors[i].end = f->tensors[i].begin + 4 * f->tensors[i].count;
  }
  *size = 8 + padded;
  return header;
}

#endif  // GDN_SAFETENSORS_H
