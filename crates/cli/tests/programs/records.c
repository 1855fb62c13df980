/* Records of many pages. All bytes of a record are equal. One program writes records, others read and compare them. A further
   program changes the file elsewhere repeatedly, so that it interrupts writes in their middle.
   Usage: records write|read|vector|punch FILE RECORDS BYTES SEED. Ends when its standard input ends, and prints the number of
   rounds. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define FAIL(...)                          \
    do {                                   \
        fprintf(stderr, __VA_ARGS__);      \
        exit(1);                           \
    } while (0)
#define PARTS 16

static int goes_on(void) {
    struct pollfd input = {.fd = 0, .events = POLLIN};
    return poll(&input, 1, 0) == 0;
}

/* Reads into several buffers whose ends lie within pages. */
static ssize_t read_vector(int fd, char *bytes, size_t len, off_t at) {
    struct iovec parts[PARTS];
    size_t begin = 0, size = len / PARTS - 100;
    for (int n = 0; n < PARTS; n++) {
        parts[n].iov_base = bytes + begin;
        parts[n].iov_len = n == PARTS - 1 ? len - begin : size;
        begin += parts[n].iov_len;
    }
    return preadv(fd, parts, PARTS, at);
}

int main(int argc, char **argv) {
    if (argc != 6)
        return 2;
    const char *what = argv[1];
    size_t records = strtoul(argv[3], 0, 10), len = strtoul(argv[4], 0, 10);
    unsigned seed = atoi(argv[5]);
    int fd = open(argv[2], *what == 'r' || *what == 'v' ? O_RDONLY : O_RDWR);
    char *bytes = aligned_alloc(4096, len);
    if (fd < 0 || !bytes)
        FAIL("%s: %m\n", argv[2]);
    unsigned long times = 0;
    for (; goes_on(); times++) {
        off_t at = (off_t)(rand_r(&seed) % records) * len;
        if (*what == 'p') {
            /* Punches the page after the records. */
            if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)records * len, 4096) != 0)
                FAIL("fallocate: %m\n");
            usleep(200);
        } else if (*what == 'w') {
            memset(bytes, 1 + (int)(rand_r(&seed) % 255), len);
            /* Writes twice, so that the second write finds the pages in the cache. */
            for (int n = 0; n < 2; n++)
                if (pwrite(fd, bytes, len, at) != (ssize_t)len)
                    FAIL("pwrite: %m\n");
        } else {
            ssize_t n = *what == 'r' ? pread(fd, bytes, len, at) : read_vector(fd, bytes, len, at);
            if (n != (ssize_t)len)
                FAIL("%s gave %zd: %m\n", what, n);
            for (size_t b = 1; b < len; b++)
                if (bytes[b] != bytes[0])
                    FAIL("half of a write: byte %zu of the record at %lld is %d and not %d, after %lu reads\n", b,
                         (long long)at, bytes[b], bytes[0], times);
        }
    }
    printf("%lu\n", times);
    return 0;
}
