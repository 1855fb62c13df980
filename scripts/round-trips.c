/* A library to preload (LD_PRELOAD). A program with it has the round trips of a FUSE filesystem, while a filesystem of the kernel serves it.
 * ROUND_TRIPS=syncs: the library waits for a FUSE daemon before each fsync and fdatasync. ROUND_TRIPS=all: also before each pread and pwrite.
 * A round trip is an fdatasync of ROUND_TRIP_FILE, a file that nobody writes, on a FUSE filesystem. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

/* Sets `next` to the C library's function of this name. */
#define NEXT(name)                                                                                                     \
    static __typeof__(name) *next;                                                                                     \
    if (!next)                                                                                                         \
        next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static int file = -1;
static int with_transfers;

/* Aborts rather than let the program run without round trips, which would be measured as if it had them. */
__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("ROUND_TRIP_FILE"), *trips = getenv("ROUND_TRIPS");
    if (!path || !trips || (file = open(path, O_RDONLY | O_CLOEXEC)) < 0)
        abort();
    with_transfers = strcmp(trips, "all") == 0;
}

static void round_trip(void) {
    NEXT(fdatasync);
    if (next(file))
        abort();
}

int fdatasync(int fd) {
    NEXT(fdatasync);
    round_trip();
    return next(fd);
}

int fsync(int fd) {
    NEXT(fsync);
    round_trip();
    return next(fd);
}

ssize_t pread(int fd, void *buffer, size_t bytes, off_t offset) {
    NEXT(pread);
    if (with_transfers)
        round_trip();
    return next(fd, buffer, bytes, offset);
}

ssize_t pwrite(int fd, const void *buffer, size_t bytes, off_t offset) {
    NEXT(pwrite);
    if (with_transfers)
        round_trip();
    return next(fd, buffer, bytes, offset);
}
