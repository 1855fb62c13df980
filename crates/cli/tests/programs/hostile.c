/*
 * hostile SEED FILE...: a malicious client. Gets a volume's segments as docs/formats/shm.md says: by the ioctl on the FILEs and
 * the handshake. Prints "ready". Then writes random words over all segments that it may write, until it is killed.
 *
 * Uses no code of the project: all offsets and constants come from that document.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define NEED(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not true: %s (%s)\n", __FILE__, __LINE__, #condition,          \
                    strerror(errno));                                                              \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

enum { FILES_MAX = 16, SLICES_MAX = 64, DESCRIPTORS_MAX = 240, PAGE = 4096, CONTROL = 0, SLOTS = 1, AREA = 2 };

/* The flags of a state. */
#define VALID (1ull << 26)
#define DIRTY (1ull << 27)
#define LATCH (1ull << 28)
#define WRITE_BACK (1ull << 29)
#define FILL (1ull << 30)
#define BACKED (1ull << 31)

struct call {
    uint32_t protocol, flags;
    uint64_t first_page;
    uint32_t pages, owner;
    uint64_t instance, unused[4];
};

struct answer {
    uint32_t status, slot, generation, pages;
    uint64_t instance, object, token, unused[3];
};

struct message {
    char magic[8];
    uint32_t protocol, words[3];
    uint64_t token;
};

_Static_assert(sizeof(struct call) == 64 && sizeof(struct answer) == 64, "as the document says");
_Static_assert(sizeof(struct message) == 32, "as the document says");

struct segment {
    unsigned char *at;
    size_t bytes;
    int fd;
};

struct slice {
    struct segment table, ages, frames;
    uint32_t frame_count, entries, lines;
};

static uint64_t seed;
static struct segment segments[3 + 3 * SLICES_MAX];
static struct slice slices[SLICES_MAX];
static uint32_t slice_count, slot_count, owner;
static uint64_t objects[FILES_MAX];
static uint32_t slots[FILES_MAX];
static int descriptors[FILES_MAX];
static int files;

static uint64_t number(void)
{
    uint64_t n = seed += 0x9e3779b97f4a7c15;
    n = (n ^ (n >> 30)) * 0xbf58476d1ce4e5b9;
    n = (n ^ (n >> 27)) * 0x94d049bb133111eb;
    return n ^ (n >> 31);
}

static uint64_t below(uint64_t limit) { return number() % limit; }

static void ask(int fd, int file, uint64_t *instance)
{
    union {
        struct call call;
        struct answer answer;
    } argument = {.call = {.protocol = 2, .flags = 1}};
    NEED(ioctl(fd, _IOC(_IOC_READ | _IOC_WRITE, 'J', 1, 64), &argument) == 0);
    NEED(argument.answer.status == 0);
    *instance = argument.answer.instance;
    objects[file] = argument.answer.object;
    slots[file] = argument.answer.slot;
}

/* Returns a token, which gives the right to write. The descriptor must be open for writing. */
static uint64_t ask_for_token(int fd)
{
    union {
        struct call call;
        struct answer answer;
    } argument = {.call = {.protocol = 2}};
    NEED(ioctl(fd, _IOC(_IOC_READ | _IOC_WRITE, 'J', 5, 64), &argument) == 0);
    NEED(argument.answer.status == 0);
    return argument.answer.token;
}

/* Receives one message. Returns the number of descriptors that came with it. */
static int receive(int socket, struct message *reply, int *fds)
{
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(DESCRIPTORS_MAX * sizeof(int))];
    } control;
    struct iovec part = {reply, sizeof *reply};
    struct msghdr head = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
                          .msg_controllen = sizeof control};
    NEED(recvmsg(socket, &head, MSG_CMSG_CLOEXEC) == sizeof *reply);
    NEED(memcmp(reply->magic, "JRCHhand", 8) == 0 && reply->protocol == 2 && reply->words[0] == 0);
    struct cmsghdr *rights = CMSG_FIRSTHDR(&head);
    NEED(rights && rights->cmsg_type == SCM_RIGHTS);
    int count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    memcpy(fds, CMSG_DATA(rights), count * sizeof(int));
    return count;
}

static struct segment map(int fd, int protection)
{
    struct stat status;
    NEED(fstat(fd, &status) == 0);
    struct segment segment = {NULL, status.st_size, fd};
    segment.at = mmap(NULL, segment.bytes, protection, MAP_SHARED, fd, 0);
    NEED(segment.at != MAP_FAILED);
    return segment;
}

static void get_segments(uint64_t instance, uint64_t token)
{
    int to = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "jericho-%016llx", (unsigned long long)instance);
    NEED(connect(to, (void *)&name, offsetof(struct sockaddr_un, sun_path) + 1 + length) == 0);
    struct message request = {"JRCHhand", 2, {0}, token}, reply;
    NEED(send(to, &request, sizeof request, MSG_NOSIGNAL) == sizeof request);
    int fds[3 + 3 * SLICES_MAX + DESCRIPTORS_MAX], have = receive(to, &reply, fds);
    owner = reply.words[1];
    slice_count = reply.words[2];
    NEED(slice_count > 0 && slice_count <= SLICES_MAX);
    while (have < 3 + 3 * (int)slice_count) have += receive(to, &reply, fds + have);
    close(to);
    for (int i = 0; i < have; i++)
        segments[i] = map(fds[i], i == CONTROL ? PROT_READ : PROT_READ | PROT_WRITE);
    const unsigned char *control = segments[CONTROL].at;
    uint32_t counts[2];
    memcpy(counts, control + 12, sizeof counts);
    slot_count = counts[1];
    NEED(memcmp(control, "JRCHshm1", 8) == 0 && counts[0] == slice_count);
    for (uint32_t i = 0; i < slice_count; i++) {
        struct slice *slice = &slices[i];
        memcpy(&slice->frame_count, control + 8192 + 64 * i, 4);
        slice->lines = ((uint64_t)slice->frame_count * 3 / 2 + 3) / 4;
        slice->entries = 4 * slice->lines;
        slice->table = segments[3 + 3 * i];
        slice->ages = segments[4 + 3 * i];
        slice->frames = segments[5 + 3 * i];
        NEED(slice->table.bytes >= slice->lines * 66ull);
        NEED(slice->ages.bytes >= slice->entries + 64ull);
        NEED(slice->frames.bytes >= slice->frame_count * 4096ull);
    }
}

static uint64_t *word(struct segment segment, size_t at) { return (uint64_t *)(segment.at + at); }

static void put(uint64_t *at, uint64_t value) { __atomic_store_n(at, value, __ATOMIC_SEQ_CST); }

static uint64_t get(uint64_t *at) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }

static uint64_t some_object(void)
{
    switch (below(4)) {
    case 0: return below(64);
    case 1: return below(1 << 30);
    default: return objects[below(files)];
    }
}

static uint64_t some_key(void)
{
    uint64_t page = below(8) ? below(1024) : below(1ull << 34);
    if (below(64) == 0) page = (1ull << 34) - 1 - below(4);
    return below(16) ? some_object() << 34 | page : number();
}

static uint64_t some_owner(void)
{
    switch (below(4)) {
    case 0: return owner;
    case 1: return 1;
    case 2: return 0;
    default: return below(1024);
    }
}

static uint64_t some_state(const struct slice *slice)
{
    uint64_t frame = below(4) ? below(slice->frame_count) : below(1 << 26);
    uint64_t flags = below(64) << 26;
    if (below(2)) flags = VALID | (below(2) ? LATCH : DIRTY | BACKED);
    return frame | flags | some_owner() << 32 | below(1 << 22) << 42;
}

static void corrupt_entry(struct slice *slice)
{
    static const uint64_t single[] = {VALID, DIRTY, LATCH, WRITE_BACK, FILL, BACKED};
    uint64_t *key = word(slice->table, 16 * below(slice->entries)), *state = key + 1;
    uint64_t *other = word(slice->table, 16 * below(slice->entries));
    switch (below(9)) {
    case 0: put(key, some_key()); break;
    case 1: put(key, 0); break;
    case 2: put(state, some_state(slice)); break;
    case 3: put(state, number()); break;
    case 4: __atomic_fetch_xor(state, single[below(6)], __ATOMIC_SEQ_CST); break;
    case 5:
        /* A latch with a possible owner. */
        put(state, (get(state) & ~(1023ull << 32)) | LATCH | some_owner() << 32);
        break;
    case 6: /* Gives two entries the same frame. */
        put(state, (get(state) & ~0x3ffffffull) | (get(other + 1) & 0x3ffffff));
        break;
    case 7: put(key, get(other)); break; /* Gives two entries the same page. */
    default: /* Copies the other entry over this one. */
        put(key, get(other));
        put(state, get(other + 1));
    }
}

static void corrupt_slice(void)
{
    struct slice *slice = &slices[below(slice_count)];
    uint16_t *overflow = (uint16_t *)(slice->table.at + 16ull * slice->entries);
    switch (below(8)) {
    case 0: overflow[below(slice->lines)] = below(3) ? below(3) : number(); break;
    case 1: slice->ages.at[below(slice->entries)] = number(); break;
    case 2: slice->ages.at[(slice->entries + 63) / 64 * 64 + below(2)] = number(); break;
    case 3: put(word(slice->frames, 8 * below(slice->frame_count * 512ull)), number()); break;
    default: corrupt_entry(slice);
    }
}

static void corrupt_file_slot(void)
{
    /* Chooses one of the client's files, and sometimes any other. */
    uint32_t slot = below(8) ? slots[below(files)] : below(64);
    size_t at = PAGE + 256ull * slot;
    size_t lock_at = below(4) ? 128 + 4 * below(30) : below(2) ? 64 : 72;
    uint32_t *lock = (uint32_t *)(segments[SLOTS].at + at + lock_at);
    switch (below(9)) {
    case 0: put(word(segments[SLOTS], at), number()); break;
    case 1: put(word(segments[SLOTS], at), below(1ull << 46)); break;
    case 2: put(word(segments[SLOTS], at), below(1 << 24)); break;
    case 3: put(word(segments[SLOTS], at + 8), number()); break;
    case 4: __atomic_store_n(lock, below(2) ? number() : some_owner(), __ATOMIC_SEQ_CST); break;
    case 5: put(word(segments[SLOTS], 64 + 8 * below(16)), below(2) ? number() : 0); break;
    case 6: ((uint32_t *)segments[SLOTS].at)[1] = below(2) ? number() : 0; break;
    case 7: put(word(segments[SLOTS], at + 72 + 8 * below(2)), below(2) ? number() : below(1 << 12)); break;
    default: __atomic_fetch_add((uint32_t *)segments[SLOTS].at, number(), __ATOMIC_SEQ_CST);
    }
}

/* Tells the daemon that this thread uses the first block for its wishes. */
static void name_this_thread(uint64_t instance)
{
    union {
        struct call call;
        struct answer answer;
    } argument = {.call = {.protocol = 2, .owner = owner, .instance = instance}};
    NEED(ioctl(descriptors[0], _IOC(_IOC_READ | _IOC_WRITE, 'J', 1, 64), &argument) == 0);
    NEED(argument.answer.status == 0);
}

/* Writes a false wish, sometimes for another file. Then makes a read, with which the daemon may answer the wish. */
static void wish(void)
{
    struct segment area = segments[AREA];
    int file = below(files);
    uint64_t block = 69632;
    /* The words of the answer. The words of the wish follow. */
    for (int i = 2; i < 5; i++)
        if (below(3) == 0) put(word(area, block + 24 + 8 * i), number());
    put(word(area, block + 32), objects[below(4) ? file : (int)below(files)]);
    put(word(area, block + 24), number() << 32 | below(8));
    char byte;
    (void)!pread(descriptors[file], &byte, 1, below(1 << 20));
}

static void corrupt_area(void)
{
    struct segment area = segments[AREA];
    switch (below(9)) {
    case 6: wish(); break;
    case 0: put(word(area, 64), below(2) ? number() : get(word(area, 64)) + below(9000)); break;
    case 1: put(word(area, 72), below(2) ? number() : get(word(area, 64))); break;
    case 2: {
        uint64_t block = 69632 + 40960 * below(16);
        put(word(area, block + 8192 + 8 * below(4096)), below(2) ? number() : below(slice_count + 1) << 32 | below(1 << 14));
        put(word(area, block + 8 + 8 * below(2)), number());
        break;
    }
    case 3: put(word(area, 69632 + 40960 * below(16) + 8 * below(520)), number()); break;
    case 4: ((uint32_t *)area.at)[below(5)] = number(); break;
    case 5: put(word(area, 128), number()); break;
    default: {
        uint64_t at = __atomic_fetch_add(word(area, 64), 1, __ATOMIC_SEQ_CST);
        put(word(area, 4096 + 8 * (at % 8192)), some_key());
        if (below(4)) __atomic_fetch_add(word(area, 72), 1, __ATOMIC_SEQ_CST);
    }
    }
}

/* Tries to shrink a segment, which must fail: SIGBUS would kill every process that then accesses the missing part. */
static void try_to_shrink_segment(void)
{
    struct segment segment = segments[below(3 + 3 * slice_count)];
    NEED(ftruncate(segment.fd, below(segment.bytes)) != 0);
}

/* Corrupts a whole table in one way. */
static void corrupt_whole_table(void)
{
    struct slice *slice = &slices[below(slice_count)];
    uint64_t kind = below(6), same = some_state(slice);
    for (uint32_t i = 0; i < slice->entries; i++) {
        uint64_t *key = word(slice->table, 16ull * i), *state = key + 1;
        switch (kind) {
        case 0: put(key, 0); break;
        case 1: put(key, some_key()); break;
        case 2: put(state, same); break;
        case 3: put(state, some_state(slice)); break;
        case 4: put(state, get(state) | LATCH | 1ull << 32); break;
        default: put(state, get(state) | (1ull << (26 + below(6))));
        }
    }
}

int main(int count, char **arguments)
{
    NEED(count > 2 && count - 2 <= FILES_MAX);
    seed = strtoull(arguments[1], NULL, 10);
    uint64_t instance = 0, token = 0;
    for (files = 0; files < count - 2; files++) {
        int fd = open(arguments[2 + files], O_RDWR);
        NEED(fd >= 0);
        descriptors[files] = fd;
        ask(fd, files, &instance);
        if (files == 0) token = ask_for_token(fd);
    }
    get_segments(instance, token);
    name_this_thread(instance);
    printf("ready\n");
    fflush(stdout);
    /* Many corruptions at once make tables that the daemon rejects. Few at once leave it time to work with each corrupted word. */
    uint64_t batch_max = (uint64_t[]){5, 50, 200}[below(3)], table_interval = (uint64_t[]){100, 500, 1000000}[below(3)];
    for (;;) {
        for (uint64_t batch = below(batch_max); batch > 0; batch--) {
            switch (below(4)) {
            case 0: corrupt_file_slot(); break;
            case 1: corrupt_area(); break;
            default: corrupt_slice();
            }
        }
        if (below(200) == 0) try_to_shrink_segment();
        if (below(table_interval) == 0) corrupt_whole_table();
        struct timespec pause = {0, below(2000000)};
        nanosleep(&pause, NULL);
    }
}
