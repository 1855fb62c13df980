/* Closes standard error, whose fd then becomes that of a file, and ends in one of several ways. Usage: DIR exit|_exit|return|exec
   */
#include "check.h"

int main(int argc, char **argv) {
    BEGIN;
    CHECK(argc == 3);
    fill("data", 1000);
    int fd = open("data", O_RDONLY);
    NEXT_ARE_FROM(fd, 0);
    CHECK(close(2) == 0);
    CHECK(open("two", O_RDWR | O_CREAT | O_TRUNC, 0600) == 2);
    CHECK(write(2, "data", 4) == 4);
    done("ends");
    CHECK(close(1) == 0);
    if (!strcmp(argv[2], "exit")) exit(3);
    if (!strcmp(argv[2], "_exit")) _exit(3);
    if (!strcmp(argv[2], "exec")) execl("/bin/sh", "sh", "-c", "exit 3", NULL);
    return 3;
}
