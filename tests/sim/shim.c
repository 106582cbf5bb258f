/* The disk of the simulation: sits between SQLite and libc (LD_PRELOAD), counts and logs every change, and fails on order.
 *
 * The snapshots' files are named relative to open folders (openat and its like): their paths are those of the folders.
 *
 * Only files below `root` are looked at, and only after sim_arm. A change is a write, a truncation, a sync, and whatever
 * makes, renames or removes a name. Each has a number, counted from 0. A rule says: from number `first` on, the next
 * `times` changes of the kinds that the action can hit go wrong. What was really changed is logged, so that the driver
 * can work out which of it a loss of power would have left. A sync is logged and not passed on: as long as the machine
 * runs, the page cache tells the same.
 *
 * The index in shared memory (-shm) and the lock are counted and can fail, but are not logged: nothing hangs on what a
 * loss of power leaves of them, and the lock holds a pid, which is another in each run.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { ACT_EIO = 1, ACT_ENOSPC, ACT_SHORT, ACT_SYNC_EIO, ACT_KILL_BEFORE, ACT_KILL_MID, ACT_KILL_AFTER };
enum { OP_CREATE = 1, OP_WRITE, OP_TRUNCATE, OP_SYNC, OP_SYNC_FAILED, OP_RENAME, OP_UNLINK, OP_MKDIR };
enum { FILES_MAX = 1024, PATH_BYTES_MAX = 192, RULES_MAX = 64, ROOT_BYTES_MAX = 512 };

struct rule {
  uint64_t first;
  uint64_t times;
  uint64_t action;
};

struct record {
  uint32_t op;
  uint32_t path_bytes;
  uint64_t offset; /* of a write; new length of a truncation */
  uint64_t data_bytes;
};

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static char root[ROOT_BYTES_MAX];
static size_t root_bytes; /* 0: not armed */
static int log_fd = -1;
static struct rule rules[RULES_MAX];
static int rule_count;
static uint64_t changes, fired;
static char paths[FILES_MAX][PATH_BYTES_MAX]; /* by descriptor, relative to root; "" is not ours */

static int (*real_open)(const char *, int, ...);
static int (*real_close)(int);
static ssize_t (*real_write)(int, const void *, size_t);
static ssize_t (*real_pwrite)(int, const void *, size_t, off_t);
static int (*real_ftruncate)(int, off_t);
static int (*real_rename)(const char *, const char *);
static int (*real_unlink)(const char *);
static int (*real_mkdir)(const char *, mode_t);
static int (*real_openat)(int, const char *, int, ...);
static int (*real_renameat)(int, const char *, int, const char *);
static int (*real_unlinkat)(int, const char *, int);
static int (*real_mkdirat)(int, const char *, mode_t);
static ssize_t (*real_pwritev)(int, const struct iovec *, int, off_t);

__attribute__((constructor)) static void find_real(void) {
  real_open = dlsym(RTLD_NEXT, "open64");
  real_close = dlsym(RTLD_NEXT, "close");
  real_write = dlsym(RTLD_NEXT, "write");
  real_pwrite = dlsym(RTLD_NEXT, "pwrite64");
  real_ftruncate = dlsym(RTLD_NEXT, "ftruncate64");
  real_rename = dlsym(RTLD_NEXT, "rename");
  real_unlink = dlsym(RTLD_NEXT, "unlink");
  real_mkdir = dlsym(RTLD_NEXT, "mkdir");
  real_openat = dlsym(RTLD_NEXT, "openat64");
  real_renameat = dlsym(RTLD_NEXT, "renameat");
  real_unlinkat = dlsym(RTLD_NEXT, "unlinkat");
  real_mkdirat = dlsym(RTLD_NEXT, "mkdirat");
  real_pwritev = dlsym(RTLD_NEXT, "pwritev64");
}

/* Starts counting from 0. Returns 0, or -1 when something does not fit. */
int sim_arm(const char *folder, int log, const struct rule *wanted, int count) {
  size_t bytes = strlen(folder);
  if (bytes == 0 || bytes >= ROOT_BYTES_MAX || count < 0 || count > RULES_MAX) return -1;
  memcpy(root, folder, bytes + 1);
  if (count) memcpy(rules, wanted, (size_t)count * sizeof *rules);
  rule_count = count, log_fd = log, changes = fired = 0;
  memset(paths, 0, sizeof paths);
  root_bytes = bytes;
  return 0;
}

uint64_t sim_changes(void) { return changes; }
uint64_t sim_fired(void) { return fired; }

/* The path below root, or NULL. */
static const char *below(const char *path) {
  if (!root_bytes || !path || strncmp(path, root, root_bytes) || path[root_bytes] != '/') return NULL;
  const char *rest = path + root_bytes + 1;
  return *rest && strlen(rest) < PATH_BYTES_MAX ? rest : NULL;
}

static const char *of(int fd) {
  return root_bytes && fd >= 0 && fd < FILES_MAX && paths[fd][0] ? paths[fd] : NULL;
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

static int hits(uint64_t action, int op) {
  switch (action) {
    case ACT_ENOSPC: return op == OP_WRITE || op == OP_CREATE || op == OP_MKDIR;
    case ACT_SHORT: return op == OP_WRITE;
    case ACT_SYNC_EIO: return op == OP_SYNC;
    default: return 1;
  }
}

/* Counts a change; returns what shall happen to it, 0 for nothing. Dies here when it must die before. */
static int next(int op) {
  uint64_t number = changes++;
  for (int i = 0; i < rule_count; i++) {
    struct rule *rule = rules + i;
    if (number < rule->first || !rule->times || !hits(rule->action, op)) continue;
    rule->times--, fired++;
    if (rule->action == ACT_KILL_BEFORE || (rule->action == ACT_KILL_MID && op != OP_WRITE)) die();
    return (int)rule->action;
  }
  return 0;
}

static int ends_with(const char *path, const char *end) {
  size_t bytes = strlen(path), end_bytes = strlen(end);
  return bytes >= end_bytes && !strcmp(path + bytes - end_bytes, end);
}

static void note(int op, const char *path, uint64_t offset, const void *data, size_t bytes) {
  size_t path_bytes = strlen(path);
  if (ends_with(path, "-shm") || ends_with(path, ".lock")) return;
  struct record head = {(uint32_t)op, (uint32_t)path_bytes, offset, bytes};
  struct iovec parts[3] = {{&head, sizeof head}, {(void *)path, path_bytes}, {(void *)data, bytes}};
  if (writev(log_fd, parts, 3) != (ssize_t)(sizeof head + path_bytes + bytes)) die();
}

static int failed(int action) {
  errno = action == ACT_ENOSPC ? ENOSPC : EIO;
  return -1;
}

static int is_error(int action) { return action == ACT_EIO || action == ACT_ENOSPC || action == ACT_SYNC_EIO; }

static int open_one(const char *path, int flags, mode_t mode) {
  const char *rest = below(path);
  if (!rest) return real_open(path, flags, mode);
  pthread_mutex_lock(&lock);
  struct stat status;
  int makes = (flags & O_CREAT) && stat(path, &status) != 0, cuts = (flags & O_TRUNC) != 0, result;
  int action = makes ? next(OP_CREATE) : cuts ? next(OP_TRUNCATE) : 0;
  if (is_error(action)) {
    result = failed(action);
  } else {
    result = real_open(path, flags, mode);
    if (result >= 0 && result < FILES_MAX) strcpy(paths[result], rest);
    if (result >= 0 && makes) note(OP_CREATE, rest, 0, NULL, 0);
    if (result >= 0 && cuts && !makes) note(OP_TRUNCATE, rest, 0, NULL, 0);
    if (action == ACT_KILL_AFTER) die();
  }
  pthread_mutex_unlock(&lock);
  return result;
}

static int mode_of(int flags, va_list rest) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; }

int open(const char *path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = (mode_t)mode_of(flags, rest);
  va_end(rest);
  return open_one(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = (mode_t)mode_of(flags, rest);
  va_end(rest);
  return open_one(path, flags | O_LARGEFILE, mode);
}

int close(int fd) {
  if (root_bytes && fd >= 0 && fd < FILES_MAX) paths[fd][0] = 0;
  return real_close(fd);
}

static ssize_t write_at(int fd, const void *data, size_t bytes, off_t offset) {
  pthread_mutex_lock(&lock);
  int action = next(OP_WRITE);
  ssize_t result = -1;
  if (is_error(action)) {
    failed(action);
  } else {
    size_t part = (action == ACT_SHORT || action == ACT_KILL_MID) && bytes > 1 ? bytes / 2 : bytes;
    result = real_pwrite(fd, data, part, offset);
    if (result > 0) note(OP_WRITE, paths[fd], (uint64_t)offset, data, (size_t)result);
    if (action == ACT_KILL_AFTER || action == ACT_KILL_MID) die();
  }
  pthread_mutex_unlock(&lock);
  return result;
}

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset) {
  return of(fd) ? write_at(fd, data, bytes, offset) : real_pwrite(fd, data, bytes, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t bytes, off_t offset) {
  return of(fd) ? write_at(fd, data, bytes, offset) : real_pwrite(fd, data, bytes, offset);
}

ssize_t write(int fd, const void *data, size_t bytes) {
  if (!of(fd)) return real_write(fd, data, bytes);
  off_t offset = lseek(fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR);
  ssize_t result = write_at(fd, data, bytes, offset);
  if (result > 0) lseek(fd, offset + result, SEEK_SET);
  return result;
}

static int truncate_one(int fd, off_t length) {
  if (!of(fd)) return real_ftruncate(fd, length);
  pthread_mutex_lock(&lock);
  int action = next(OP_TRUNCATE), result = -1;
  if (is_error(action)) {
    failed(action);
  } else {
    result = real_ftruncate(fd, length);
    if (result == 0) note(OP_TRUNCATE, paths[fd], (uint64_t)length, NULL, 0);
    if (action == ACT_KILL_AFTER) die();
  }
  pthread_mutex_unlock(&lock);
  return result;
}

int ftruncate(int fd, off_t length) { return truncate_one(fd, length); }
int ftruncate64(int fd, off_t length) { return truncate_one(fd, length); }

static int sync_one(int fd) {
  pthread_mutex_lock(&lock);
  int action = next(OP_SYNC), result = 0;
  if (is_error(action)) {
    note(OP_SYNC_FAILED, paths[fd], 0, NULL, 0);
    result = failed(action);
  } else {
    note(OP_SYNC, paths[fd], 0, NULL, 0);
    if (action == ACT_KILL_AFTER) die();
  }
  pthread_mutex_unlock(&lock);
  return result;
}

int fsync(int fd) {
  static int (*real_fsync)(int);
  if (of(fd)) return sync_one(fd);
  if (!real_fsync) real_fsync = dlsym(RTLD_NEXT, "fsync");
  return real_fsync(fd);
}

int fdatasync(int fd) {
  static int (*real_fdatasync)(int);
  if (of(fd)) return sync_one(fd);
  if (!real_fdatasync) real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
  return real_fdatasync(fd);
}

int rename(const char *from, const char *to) {
  const char *old = below(from), *new = below(to);
  if (!old || !new) return real_rename(from, to);
  pthread_mutex_lock(&lock);
  int action = next(OP_RENAME), result = -1;
  if (is_error(action)) {
    failed(action);
  } else {
    result = real_rename(from, to);
    if (result == 0) {
      for (int fd = 0; fd < FILES_MAX; fd++)
        if (!strcmp(paths[fd], old)) strcpy(paths[fd], new);
      note(OP_RENAME, old, 0, new, strlen(new));
    }
    if (action == ACT_KILL_AFTER) die();
  }
  pthread_mutex_unlock(&lock);
  return result;
}

static int name_change(int op, const char *path, const char *rest, mode_t mode) {
  pthread_mutex_lock(&lock);
  int action = next(op), result = -1;
  if (is_error(action)) {
    failed(action);
  } else {
    result = op == OP_UNLINK ? real_unlink(path) : real_mkdir(path, mode);
    if (result == 0) note(op, rest, 0, NULL, 0);
    if (action == ACT_KILL_AFTER) die();
  }
  pthread_mutex_unlock(&lock);
  return result;
}

int unlink(const char *path) {
  const char *rest = below(path);
  return rest ? name_change(OP_UNLINK, path, rest, 0) : real_unlink(path);
}

int mkdir(const char *path, mode_t mode) {
  const char *rest = below(path);
  return rest ? name_change(OP_MKDIR, path, rest, mode) : real_mkdir(path, mode);
}

/* --- relative to an open folder ------------------------------------------------------------------------ */

/* The whole path of a name in an open folder; the name itself where it needs no folder or does not fit. */
static const char *whole(int folder, const char *name, char *into, size_t size) {
  if (!root_bytes || folder == AT_FDCWD || name[0] == '/') return name;
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
  ssize_t bytes = readlink(link, into, size - 1);
  if (bytes <= 0 || (size_t)bytes + 1 + strlen(name) >= size) return name;
  into[bytes] = '/';
  strcpy(into + bytes + 1, name);
  return into;
}

enum { WHOLE_BYTES_MAX = ROOT_BYTES_MAX + PATH_BYTES_MAX };

static int openat_one(int folder, const char *name, int flags, mode_t mode) {
  char path[WHOLE_BYTES_MAX];
  const char *found = whole(folder, name, path, sizeof path);
  return below(found) ? open_one(found, flags, mode) : real_openat(folder, name, flags, mode);
}

int openat(int folder, const char *name, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = (mode_t)mode_of(flags, rest);
  va_end(rest);
  return openat_one(folder, name, flags, mode);
}

int openat64(int folder, const char *name, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = (mode_t)mode_of(flags, rest);
  va_end(rest);
  return openat_one(folder, name, flags | O_LARGEFILE, mode);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
  char old[WHOLE_BYTES_MAX], new[WHOLE_BYTES_MAX];
  const char *old_path = whole(from_folder, from, old, sizeof old);
  const char *new_path = whole(to_folder, to, new, sizeof new);
  if (below(old_path) && below(new_path)) return rename(old_path, new_path);
  return real_renameat(from_folder, from, to_folder, to);
}

int unlinkat(int folder, const char *name, int flags) {
  char path[WHOLE_BYTES_MAX];
  const char *found = whole(folder, name, path, sizeof path), *rest = below(found);
  return rest && !flags ? name_change(OP_UNLINK, found, rest, 0) : real_unlinkat(folder, name, flags);
}

int mkdirat(int folder, const char *name, mode_t mode) {
  char path[WHOLE_BYTES_MAX];
  const char *found = whole(folder, name, path, sizeof path), *rest = below(found);
  return rest ? name_change(OP_MKDIR, found, rest, mode) : real_mkdirat(folder, name, mode);
}

/* One change, as one write of all parts. */
static ssize_t write_parts(int fd, const struct iovec *parts, int count, off_t offset) {
  if (!of(fd)) return real_pwritev(fd, parts, count, offset);
  size_t bytes = 0, at = 0;
  for (int i = 0; i < count; i++) bytes += parts[i].iov_len;
  char *data = malloc(bytes ? bytes : 1);
  if (!data) return failed(ACT_ENOSPC);
  for (int i = 0; i < count; at += parts[i++].iov_len) memcpy(data + at, parts[i].iov_base, parts[i].iov_len);
  ssize_t result = write_at(fd, data, bytes, offset);
  int number = errno;
  free(data);
  errno = number;
  return result;
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
  return write_parts(fd, parts, count, offset);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t offset) {
  return write_parts(fd, parts, count, offset);
}

/* Only Python calls these, and always without flags. */
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
  return flags ? failed(ACT_EIO) : write_parts(fd, parts, count, offset);
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
  return flags ? failed(ACT_EIO) : write_parts(fd, parts, count, offset);
}
