/* Streams and fds in turn share one offset. */
#include "check.h"
#include <execinfo.h>
#include <stdarg.h>

int __dprintf_chk(int, int, const char *, ...);
int __vdprintf_chk(int, int, const char *, va_list);

static int with_list(int fd, const char *format, ...) {
    va_list list;
    va_start(list, format);
    int count = vdprintf(fd, format, list);
    va_end(list);
    return count;
}

static int with_checked_list(int fd, const char *format, ...) {
    va_list list;
    va_start(list, format);
    int count = __vdprintf_chk(fd, 1, format, list);
    va_end(list);
    return count;
}

static void contains(const char *name, const char *text) {
    char found[4096] = {0};
    int fd = open(name, O_RDONLY);
    CHECK(fd >= 0);
    CHECK(read(fd, found, sizeof found - 1) == (ssize_t)strlen(text));
    CHECK(strcmp(found, text) == 0);
    CHECK(close(fd) == 0);
}

static void mixed(void) {
    FILE *(*opens[])(const char *, const char *) = {fopen, fopen64};
    unsigned char ten[10];
    for (int i = 0; i < 2; i++) {
        FILE *file = opens[i]("data", "r");
        CHECK(file);
        setvbuf(file, NULL, _IONBF, 0);
        for (long offset = 0; offset < 1000; offset += 20) {
            CHECK(fread(ten, 1, 10, file) == 10 && is_from(ten, 10, offset));
            NEXT_ARE_FROM(fileno(file), offset + 10);
        }
        CHECK(fclose(file) == 0);
    }
    /* An fd that was read before it became a stream's. */
    int fd = open("data", O_RDONLY);
    NEXT_ARE_FROM(fd, 0);
    FILE *file = fdopen(fd, "r");
    CHECK(file && fileno(file) == fd);
    CHECK(ftell(file) == 10);
    CHECK(fread(ten, 1, 10, file) == 10 && is_from(ten, 10, 10));
    CHECK(fseek(file, 500, SEEK_SET) == 0);
    CHECK(fflush(file) == 0);
    NEXT_ARE_FROM(fd, 500);
    /* A duplicate of the fd while it is a stream's. */
    int copy = dup(fd);
    NEXT_ARE_FROM(copy, 510);
    CHECK(fclose(file) == 0);
    NEXT_ARE_FROM(copy, 520);
    CHECK(close(copy) == 0);
    CHECK(fdopen(99, "r") == NULL && errno == EBADF);

    file = fopen("mixed", "w+");
    CHECK(file && fputs("one ", file) >= 0 && fflush(file) == 0);
    CHECK(write(fileno(file), "two ", 4) == 4);
    CHECK(fputs("three", file) >= 0 && fclose(file) == 0);
    contains("mixed", "one two three");
    file = fopen("mixed", "a");
    CHECK(file && fputs(" four", file) >= 0 && fflush(file) == 0);
    CHECK(write(fileno(file), " five", 5) == 5);
    CHECK(fclose(file) == 0);
    contains("mixed", "one two three four five");
    done("mixed");
}

static void reopened(void) {
    FILE *(*again[])(const char *, const char *, FILE *) = {freopen, freopen64};
    unsigned char ten[10];
    for (int i = 0; i < 2; i++) {
        FILE *file = fopen("mixed", "r");
        CHECK(file && fgetc(file) == 'o');
        file = again[i]("data", "r", file);
        CHECK(file);
        CHECK(fread(ten, 1, 10, file) == 10 && is_from(ten, 10, 0));
        CHECK(pread(fileno(file), ten, 10, 50) == 10 && is_from(ten, 10, 50));
        CHECK(fclose(file) == 0);
    }
    FILE *file = tmpfile();
    CHECK(file && fputs("temporary", file) >= 0 && fflush(file) == 0);
    CHECK(pread(fileno(file), ten, 9, 0) == 9 && memcmp(ten, "temporary", 9) == 0);
    CHECK(fclose(file) == 0);
    file = fmemopen("memory", 6, "r");
    CHECK(file && fgetc(file) == 'm' && fclose(file) == 0);
    done("reopened");
}

static void formatted(void) {
    int fd = open("formatted", O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(write(fd, "a ", 2) == 2);
    CHECK(dprintf(fd, "%d %s %.1f %d %d %d %d %.2f ", 1, "x", 1.5, 2, 3, 4, 5, 6.25) == 21);
    CHECK(write(fd, "b ", 2) == 2);
    CHECK(__dprintf_chk(fd, 1, "%.1f %d ", 2.5, 7) == 6);
    CHECK(write(fd, "c ", 2) == 2);
    CHECK(with_list(fd, "%s %.1f ", "y", 3.5) == 6);
    CHECK(write(fd, "d ", 2) == 2);
    CHECK(with_checked_list(fd, "%s %d ", "z", 8) == 4);
    CHECK(write(fd, "e", 1) == 1);
    contains("formatted", "a 1 x 1.5 2 3 4 5 6.25 b 2.5 7 c y 3.5 d z 8 e");
    void *frame = mixed;
    backtrace_symbols_fd(&frame, 1, fd);
    off_t end = lseek(fd, 0, SEEK_CUR);
    CHECK(end > 50 && end == lseek(fd, 0, SEEK_END));
    CHECK(write(fd, "end", 3) == 3);
    struct stat stat;
    CHECK(fstat(fd, &stat) == 0 && stat.st_size == end + 3);
    CHECK(close(fd) == 0);
    done("formatted");
}

/* Redirects output as a daemon does, without the stream's knowledge. */
static void redirected(void) {
    fflush(stdout);
    int before = dup(1);
    int fd = open("log", O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(write(fd, "first\n", 6) == 6);
    CHECK(dup2(fd, 1) == 1);
    printf("second\n");
    fflush(stdout);
    CHECK(write(1, "third\n", 6) == 6);
    CHECK(write(fd, "fourth\n", 7) == 7);
    printf("fifth\n");
    fflush(stdout);
    CHECK(write(fd, "sixth\n", 6) == 6);
    CHECK(dup2(before, 1) == 1);
    contains("log", "first\nsecond\nthird\nfourth\nfifth\nsixth\n");
    /* The fd is free, and the next file gets it. */
    CHECK(close(1) == 0);
    int again = open("log2", O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(again == 1);
    CHECK(write(1, "one\n", 4) == 4);
    printf("two\n");
    fflush(stdout);
    CHECK(write(1, "three\n", 6) == 6);
    CHECK(dup2(before, 1) == 1 && close(before) == 0);
    contains("log2", "one\ntwo\nthree\n");
    /* The same with a stream of the program's own. */
    FILE *file = fopen("log3", "w");
    int other = open("log4", O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(write(other, "one\n", 4) == 4);
    CHECK(dup2(other, fileno(file)) == fileno(file));
    CHECK(fputs("two\n", file) >= 0 && fflush(file) == 0);
    CHECK(write(other, "three\n", 6) == 6);
    CHECK(fclose(file) == 0 && close(other) == 0);
    contains("log4", "one\ntwo\nthree\n");
    done("redirected");
}

int main(int argc, char **argv) {
    BEGIN;
    fill("data", 20000);
    mixed();
    reopened();
    formatted();
    redirected();
    return 0;
}
