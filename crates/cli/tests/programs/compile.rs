//! A compiler reads, writes and maps files on the mount, and its output runs from there.

use crate::program::shell_in;
use crate::volume::Volume;

#[test]
fn a_program_is_compiled_linked_and_executed_on_the_mount() {
    let volume = Volume::mounted("256M", 2, "16M");
    let dir = volume.make_dir("src");
    shell_in(
        &dir,
        r##"for n in 1 2 3 4 5 6 7 8; do
             echo "#include <stdio.h>
                   int part$n(void) { return puts(\"part $n\") >= 0 ? $n : -1; }" > part$n.c
           done
           cat > main.c <<END
int part1(void); int part2(void); int part3(void); int part4(void);
int part5(void); int part6(void); int part7(void); int part8(void);
int main(void) { return part1() + part2() + part3() + part4() + part5() + part6() + part7() + part8() == 36 ? 0 : 1; }
END
           for c in *.c; do cc -g -O1 -pipe -c $c & done
           wait
           ar rcs libparts.a part?.o
           cc -shared -fPIC -o libshared.so part?.c
           cc -o static main.o libparts.a
           cc -o shared main.o -L. -lshared
           [ "$(./static | wc -l)" = 8 ]
           LD_LIBRARY_PATH=. ./shared
           cp static copy && strip copy && ./copy"##,
    );
    volume.remount();
    // The cache is cold: the program loader's mappings read the pages.
    shell_in(&dir, "./static && LD_LIBRARY_PATH=. ./shared && ./copy");
    volume.finish();
}
