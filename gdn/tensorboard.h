// tensorboard.h: the curves of a run as TensorBoard event files, beside log.jsonl. Nothing but this header is needed to
// write them; `tensorboard --logdir DIR` shows them.
//
// A file is a chain of TFRecords: length (uint64), masked CRC-32C of the length (uint32), the bytes of one Event,
// masked CRC-32C of these bytes; all little-endian. An Event is a protocol buffer (tensorflow/core/util/event.proto,
// framework/summary.proto), written by hand:
//   Event     1 wall_time double, 2 step int64, 3 file_version string, 5 summary Summary, 7 session_log SessionLog
//   Summary   1 value, repeated: 1 tag string, 2 simple_value float      SessionLog 1 status enum (1: START)
// Every start of a run begins a file of its own, whose name sorts behind those that are there: readers take them in
// that order. Its second record, SessionLog START with the first step that the file will hold, tells them to forget
// what earlier files say about this step and later ones: steps done again after a crash appear once, as in log.jsonl.
//
// defines: EventFile, event_file_open, event_file_step, event_file_value, event_file_close, crc32c
#ifndef GDN_TENSORBOARD_H
#define GDN_TENSORBOARD_H

#include <dirent.h>
#include "log.h"

typedef struct {
  Log file;  // its descriptor and what a full disk did not take yet; path "": closed, events go nowhere
} EventFile;

// CRC-32C (Castagnoli), reflected polynomial 0x82f63b78; a record has 100 to 200 bytes.
static inline uint32_t crc32c(const unsigned char *data, size_t size) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < size; i++) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0x82f63b78u & (0u - (crc & 1)));
  }
  return ~crc;
}

// ----------------------------------------------------------------------------
// protocol buffers

enum { EVENT_BYTES = 512, PROTO_VARINT = 0, PROTO_FIXED64 = 1, PROTO_BYTES = 2, PROTO_FIXED32 = 5 };

typedef struct {
  unsigned char data[EVENT_BYTES];
  size_t size;
} EventBytes;

static inline void event_put(EventBytes *b, const void *data, size_t size) {
  if (size > sizeof b->data - b->size) fail(EXIT_INTERNAL, "an event of more than %d bytes", EVENT_BYTES);
  memcpy(b->data + b->size, data, size);
  b->size += size;
}

static inline void event_put_fixed(EventBytes *b, uint64_t x, int bytes) {
  unsigned char little[8];
  for (int i = 0; i < bytes; i++) little[i] = (unsigned char)(x >> 8 * i);
  event_put(b, little, (size_t)bytes);
}

static inline void event_put_varint(EventBytes *b, uint64_t x) {
  for (; x >= 128; x >>= 7) event_put_fixed(b, (x & 127) | 128, 1);
  event_put_fixed(b, x, 1);
}

static inline void event_put_key(EventBytes *b, int field, int type) {
  event_put_varint(b, (uint64_t)field << 3 | (uint64_t)type);
}

static inline void event_put_bytes(EventBytes *b, int field, const void *data, size_t size) {
  event_put_key(b, field, PROTO_BYTES);
  event_put_varint(b, size);
  event_put(b, data, size);
}

static inline EventBytes event_begin(int64_t step) {
  EventBytes b;
  struct timespec now;
  uint64_t bits;
  b.size = 0;
  clock_gettime(CLOCK_REALTIME, &now);
  double wall_time = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
  memcpy(&bits, &wall_time, 8);
  event_put_key(&b, 1, PROTO_FIXED64), event_put_fixed(&b, bits, 8);
  event_put_key(&b, 2, PROTO_VARINT), event_put_varint(&b, (uint64_t)step);
  return b;
}

static inline void summary_add(EventBytes *summary, const char *tag, double value) {
  EventBytes v;
  float x = (float)value;
  uint32_t bits;
  v.size = 0;
  memcpy(&bits, &x, 4);
  event_put_bytes(&v, 1, tag, strlen(tag));
  event_put_key(&v, 2, PROTO_FIXED32), event_put_fixed(&v, bits, 4);
  event_put_bytes(summary, 1, v.data, v.size);
}

// ----------------------------------------------------------------------------
// the file

static inline void event_put_checksum(EventBytes *record, const unsigned char *data, size_t size) {
  uint32_t crc = crc32c(data, size);
  event_put_fixed(record, (uint32_t)((crc >> 15 | crc << 17) + 0xa282ead8u), 4);
}

// Frames one event and hands it to the disk. A full disk does not stop the run: what it did not take stays in memory
// and is tried again with the next event.
static inline void event_file_write(EventFile *e, const EventBytes *event) {
  Log *l = &e->file;
  EventBytes record;
  record.size = 0;
  event_put_fixed(&record, event->size, 8);
  event_put_checksum(&record, record.data, 8);
  event_put(&record, event->data, event->size);
  event_put_checksum(&record, event->data, event->size);
  char *grown = (char *)realloc(l->pending, l->pending_size + record.size);
  if (!grown) {
    warn("%s: an event is lost: no memory", l->path);
    return;
  }
  memcpy(grown + l->pending_size, record.data, record.size);
  l->pending = grown, l->pending_size += record.size;
  log_flush(l);
}

// mkdir -p. 0, or -1 with errno set.
static inline int event_folder_make(const char *dir) {
  char part[PATH_SIZE];
  size_t n = strlen(dir);
  for (size_t i = 1; i <= n; i++) {
    if (dir[i] != '/' && dir[i]) continue;
    memcpy(part, dir, i);
    part[i] = 0;
    if (io_mkdir(part) && errno != EEXIST) return -1;
  }
  return 0;
}

// The largest time in the names of the event files of a folder, 0: there are none.
static inline long long event_folder_last(const char *dir) {
  static const char prefix[] = "events.out.tfevents.";
  long long last = 0;
  DIR *d = opendir(dir);
  if (!d) return 0;
  for (struct dirent *f; (f = readdir(d)) != NULL;) {
    if (strncmp(f->d_name, prefix, sizeof prefix - 1)) continue;
    long long t = strtoll(f->d_name + sizeof prefix - 1, NULL, 10);
    if (t > last && t < 9999999999) last = t;
  }
  closedir(d);
  return last;
}

// Begins an event file. where: "off" or "" for none, "on" for one in the run's folder `out`, else the folder for it,
// which is made. step: steps done so far. 0, or EXIT_CHECKPOINT.
static inline int event_file_open(EventFile *e, const char *where, const char *out, int64_t step, Error *err) {
  Log *l = &e->file;
  memset(e, 0, sizeof *e);
  l->fd = -1;
  if (!where[0] || !strcmp(where, "off")) return 0;
  const char *dir = strcmp(where, "on") ? where : out;
  if (strlen(dir) >= PATH_SIZE - 1) errno = ENAMETOOLONG;
  if (strlen(dir) >= PATH_SIZE - 1 || event_folder_make(dir))
    return error_set(err, EXIT_CHECKPOINT, "--tensorboard %.1000s: cannot make the folder: %s", dir, strerror(errno));

  char host[64], name[160], path[PATH_SIZE];
  if (gethostname(host, sizeof host)) strcpy(host, "host");
  host[sizeof host - 1] = 0;
  long long now = (long long)time(NULL), last = event_folder_last(dir);
  snprintf(name, sizeof name, "events.out.tfevents.%010lld.%s.%lld", now > last ? now : last + 1, host,
           (long long)getpid());
  if (path_join(path, dir, name, err)) return EXIT_CHECKPOINT;
  l->fd = io_refused("create", path) ? -1 : open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (l->fd < 0)
    return error_set(err, EXIT_CHECKPOINT, "--tensorboard: %.1000s: cannot be opened: %s", path, strerror(errno));
  memcpy(l->path, path, sizeof path);

  EventBytes event = event_begin(0);
  event_put_bytes(&event, 3, "brain.Event:2", 13);
  event_file_write(e, &event);
  event = event_begin(step + 1);
  event_put_bytes(&event, 7, "\x08\x01", 2);  // session_log: status START
  event_file_write(e, &event);
  return 0;
}

// One event for a step: train/loss, train/grad_norm, train/lr, train/tokens_per_s, as fp32. What is not finite stays
// so: TensorBoard marks it.
static inline void event_file_step(EventFile *e, const LogStep *s) {
  if (!e->file.path[0]) return;
  EventBytes event = event_begin(s->step), summary;
  summary.size = 0;
  summary_add(&summary, "train/loss", s->loss);
  summary_add(&summary, "train/grad_norm", s->grad_norm);
  summary_add(&summary, "train/lr", s->lr);
  summary_add(&summary, "train/tokens_per_s", s->tokens_per_s);
  event_put_bytes(&event, 5, summary.data, summary.size);
  event_file_write(e, &event);
}

// One value under a tag of at most 100 bytes, such as val/loss.
static inline void event_file_value(EventFile *e, int64_t step, const char *tag, double value) {
  if (!e->file.path[0]) return;
  EventBytes event = event_begin(step), summary;
  summary.size = 0;
  summary_add(&summary, tag, value);
  event_put_bytes(&event, 5, summary.data, summary.size);
  event_file_write(e, &event);
}

static inline void event_file_close(EventFile *e) {
  if (e->file.path[0]) log_close(&e->file);
  e->file.path[0] = 0;
}

#endif  // GDN_TENSORBOARD_H
