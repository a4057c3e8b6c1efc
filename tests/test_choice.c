/* Runs the program on samples with unusual members and on class folders, and tests which members it reads. */
#include "shell.h"

#include "cells.h"

#if defined(HAVE_XXHASH)

TestSuite(choice, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

#define FAST   "--cache any --warmup-time 0 --min-time 0 --max-time 0 --min-samples 2 --format csv --verify "
#define SHARDS "$P --variant shards,shards-mmap,shards-omp " FAST
#define FILES  "$P --variant files,files-omp " FAST
#define TRAIN  "$P --variant train-naive --model logreg --epochs 1 --format csv --batch 7 "

/* Runs a command that prints CSV rows, and expects this mean size of a sample in each row. */
static void expect_bytes(double bytes, const char *command, const char *options)
{
    EXPECT(0, "%s %s", command, options);
    for (size_t row = 1; row <= 2; row++)
        cr_expect_float_eq(number(out, row, "sample_bytes"), bytes, 1e-9, "%s", options);
}

/* Trains with these options, which begin with the data set. Returns the training loss. */
static double loss_of(const char *options)
{
    EXPECT(0, TRAIN "--data %s", options);
    return number(out, 1, "train_loss");
}

/* Creates 20 digits as files in the folder o and as the shard s/x.tar. Each digit has four members: .cls of 1
 * byte, .json of 22 bytes, .NPY, and .txt of 7 bytes. */
static void make_odd_shard(void)
{
    EXPECT(0, "$P --prepare d --from digits --samples 20 --encode npy --store files && mkdir s o && cd o && "
              "for k in ../d/not-imagefolder/000/*.npy; do n=$(basename $k .npy); cp $k $n.NPY; "
              "cp ${k%%npy}cls $n.cls; printf '{\"a\": {\"label\": %%4d}}' $(cat $n.cls) > $n.json; "
              "printf caption > $n.txt; done && tar cf ../s/x.tar --format=ustar *");
}

#define ARRAY (128 + 28 * 28) /* bytes of the .npy of a digit */

Test(choice, samples_with_unusual_members_are_read_or_refused)
{
    make_odd_shard();
    expect_bytes(ARRAY + 1, SHARDS "--data s", "");
    expect_bytes(ARRAY + 1, FILES "--data o", "--decode");
    expect_bytes(ARRAY + 22, SHARDS "--data s", "--label json:a.label");
    expect_bytes(ARRAY + 22, FILES "--data o", "--label 'xml;JSON:a.label;cls'");
    expect_bytes(ARRAY + 1 + 22 + 7, SHARDS "--data s", "--member all");
    expect_bytes(7, SHARDS "--data s", "--member TXT");
    EXPECT(0, "cp s/x.tar s/y.tar");
    expect_bytes(7, SHARDS "--data s/x.tar", "--member txt");
    EXPECT(0, "rm s/y.tar && cd s && " SHARDS "--data x.tar");
    cr_expect_eq(number(out, 1, "items"), 20);
    expect_refused(2, "Not a directory; name a folder, a shard", "$P --variant shards --data o/000000.txt");
    expect_bytes(8, FILES "--data o", "--image txt");
    expect_refused(1, "'000000': it has no member for --image png;jpg; its members are: ",
                   "$P --variant shards --data s --image 'png;jpg'");
    expect_refused(1, "'000000': it has no member for --label xml; its members are: ",
                   "$P --variant shards --data s --label xml");
    expect_refused(1, "'000000': it has no member for --member bin; its members are: ",
                   "$P --variant files --data o --member bin");
    expect_refused(2, "drop --image and --label", "$P --variant shards --data s --member txt --label cls");
    EXPECT(0, "rm o/000003.cls o/000004.cls");
    expect_refused(1, "'000003': it has no member for --label cls; its members are: ",
                   "$P --variant files --data o --label cls");
    EXPECT(0, FILES "--data o --label cls --on-error skip");
    cr_expect_eq(number(out, 1, "items"), 18);
    EXPECT(0, "cp o/000005.cls o/000005.CLS");
    expect_refused(1, "sample '000005': it has 'cls' twice", "$P --variant files --data o --member txt");
}

/* In prepared shards, the headers of all members are verified, even those of members that are not read. */
Test(choice, all_headers_of_prepared_shards_are_verified)
{
    EXPECT(0, "$P --prepare p --from digits --samples 20 --encode npy");
    expect_bytes(ARRAY, SHARDS "--data p", "--member npy --on-error skip");
    expect_bytes(1, SHARDS "--data p", "--member cls");
    EXPECT(0, "printf X | dd of=p/digits-000000.tar bs=1 seek=3 conv=notrunc");
    expect_refused(1, "digits-000000.tar: offset 0: wrong header checksum",
                   "$P --variant shards-mmap --data p --member cls " FAST);
}

/* Raw records of any length, each with a JSON member that is not read. */
Test(choice, raw_records_of_any_length_are_read)
{
    EXPECT(0, "mkdir r s && cd r && n=0 && for b in 0 1 7 511 512 513 4096 65537 1000003; do n=$((n + 1)); "
              "head -c $b /dev/urandom > $n.bin; echo '{}' > $n.json; done && tar cf ../s/x.tar *");
    double mean = (0 + 1 + 7 + 511 + 512 + 513 + 4096 + 65537 + 1000003) / 9.0;
    expect_bytes(mean, SHARDS "--data s", "--member bin --batch 2");
    expect_bytes(mean, FILES "--data r", "--member bin --batch 5");
    expect_bytes(mean + 3, SHARDS "--data s", "");
}

#ifdef HAVE_JANSSON
/* Training reads the same label from every member that has it. */
Test(choice, training_reads_labels_from_any_member)
{
    make_odd_shard();
    const double loss = loss_of("s");
    cr_expect_eq(loss_of("o --label json:a.label"), loss);
    cr_expect_eq(loss_of("s --label 'xml;cls'"), loss);
    expect_refused(1, "sample '000000': its json has no field 'a.b'", TRAIN "--data s --label json:a.b");
    EXPECT_PRINTS(0, "all samples have class 0", TRAIN "--data s --label txt 2>&1"); /* one word */
    expect_refused(1, "it has no member for --label folder", TRAIN "--data s --label folder");
    expect_refused(1, "it has no member for --image png", TRAIN "--data s --image png");
}
#endif

/* Shards of class folders whose files have dots in their names: the rule of webdataset makes them one sample
 * per folder and name, which is not what the user wants. Two views of a sample with a label are not such. */
Test(choice, names_with_dots_in_shards_are_explained)
{
    EXPECT(
        0,
        "mkdir -p k/cat s v && cd k/cat && for i in 0 1 2 3 4 5; do printf $i > cat.$i.jpg; done && cd .. && "
        "tar cf ../s/x.tar --sort=name cat && cd ../v && printf 1 > a.left.png && printf 2 > a.right.png && "
        "printf 3 > a.cls && tar cf x.tar --sort=name a.*");
    EXPECT_PRINTS(
        0,
        "warning: s: the sample 'cat/cat' has 6 images (.0.jpg, .1.jpg, ...); names are split at their "
        "first dot, as webdataset does; if each file is a sample, rename the files, or unpack the shard",
        SHARDS "--data s");
    EXPECT_PRINTS(1, "has 6 members, more than 4; names are split at their first dot",
                  "$P --prepare p --from dataset --source s");
    EXPECT_PRINTS(1,
                  "its members are: 0.jpg, 1.jpg, 2.jpg, 3.jpg, 4.jpg, 5.jpg; names are split at their first",
                  "$P --variant shards --decode --data s");
    EXPECT(0, SHARDS "--data v");
    cr_expect_not(says("warning: v:"), "%s", out);
    EXPECT(0, "rm s/* && cd k/cat && for i in $(seq 6 70); do printf 1 > cat.$i.jpg; done && cd .. && "
              "tar cf ../s/x.tar cat");
    EXPECT_PRINTS(1, "it has 71 members, more than 64; names are split at their first dot",
                  "$P --variant shards --data s");
}

/* A file that a web server or a packer wrote is no shard. */
Test(choice, other_files_in_place_of_shards_are_named)
{
    static const char *const cases[][2] = {
        {"gzip < x.tar", "this is not a tar file, but gzip data: unpack it"},
        {"echo '<html>404</html>'", "this is not a tar file, but an HTML or XML page"},
        {"echo '<?xml version=\"1.0\"?><Error/>'", "this is not a tar file, but an HTML or XML page"},
        {"printf '\\n <!DOCTYPE html>'; seq 1000", "this is not a tar file, but an HTML or XML page"},
        {"head -c 700 /dev/urandom | tr B C", "offset 0: "}};
    EXPECT(0, "mkdir s && $P --prepare d --from digits --samples 3 --encode npy && mv d/*.tar x.tar");
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        EXPECT_PRINTS(1, cases[i][1], "{ %s; } > s/y.tar; $P --variant shards --data s", cases[i][0]);
    EXPECT(0, "cd s && printf x > BZh.txt && printf x > '<html.txt' && tar cf y.tar BZh.txt && "
              "tar cf z.tar '<html.txt' && rm *.txt && " SHARDS "--data .");
}

/* Images whose names end in .jpg, but that are of another format, need a conversion, not a new download. */
Test(choice, images_with_the_wrong_extension_are_named)
{
    static const char *const cases[][2] = {
        {"GIF89a\\1\\0", "gif"}, {"BM\\1\\2\\3\\4\\0\\0\\0\\0", "bmp"}, {"II*\\0", "tiff"},
        {"MM\\0*", "tiff"},      {"\\0\\0\\0\\30ftypheic", "heic"},     {"\\0\\0\\0\\30ftypavif", "avif"}};
    char wanted[200];
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (int png = 0; png <= 1; png++) {
            const char *extension = png ? "PNG" : "jpg";
            snprintf(
                wanted, sizeof wanted,
                "the file is named .%s, but its content is %s; %s images cannot be decoded; convert them",
                extension, cases[i][1], cases[i][1]);
            EXPECT_PRINTS(
                1, wanted,
                "rm -rf f && mkdir f && printf '%s' > f/1.%s && $P --variant files --decode --data f",
                cases[i][0], extension);
            EXPECT_PRINTS(0, wanted, "rm -rf p && $P --prepare p --from dataset --source f");
        }
}

/* ---- Class folders ---- */

/* Class folders are sorted by the bytes of their names: "Zoo", "ant", "ant-b". */
Test(choice, class_folders_are_numbered_in_order)
{
    EXPECT(0, "$P --prepare d --from digits --samples 20 --store files --encode npy && mkdir -p c/ant/more "
              "c/ant-b c/Zoo c/.hidden && cd d/not-imagefolder/000 && cp 000001.npy ../../../c/ant/more && "
              "cp 000002.npy 000003.npy ../../../c/ant-b && cp 000004.npy 000005.npy ../../../c/Zoo");
    expect_bytes(ARRAY, FILES "--data c", "--label folder");
    EXPECT_PRINTS(0,
                  "Zoo/000004.npy Zoo/000005.npy ant/more/000001.npy ant-b/000002.npy ant-b/000003.npy 00122",
                  "$P --prepare p --from dataset --source c && tar xf p/dataset-000000.tar && "
                  "cut -d, -f2 p/samples.csv | tail -n +2 | tr '\\n' ' ' && cat 00000?.cls");
    EXPECT(0, "printf 4 > c/Zoo/000004.cls");
    EXPECT_PRINTS(1, "it has no member for --label folder", "$P --variant files --data c --label folder");
}

/* Lists the files and labels that are read from a folder, in order, as "cat/0.png=0 ". */
#define LISTED                                                                                             \
    "rm -rf L; $P --prepare L --from dataset --source %s >log 2>&1 || cat log; mkdir L/x; tar xf L/*.tar " \
    "-C "                                                                                                  \
    "L/x && tail -n +2 L/samples.csv | while IFS=, read -r key from rest; do printf '%%s=%%s ' \"$from\" " \
    "\"$(cat L/x/$key.cls)\"; done"

/* Every image is a sample, whatever its name is, with the label and in the order of ImageFolder. */
Test(choice, each_image_in_class_folders_is_a_sample)
{
    EXPECT(0, "mkdir -p c/b/x/y c/__a__ c/'a b' c/b.png && cd c && for f in b/3.jpg b/3.png b/cat.0.png "
              "b/cat.1.png b/.png.PNG b/x/y/3.JPG b/x.webp __a__/q.tiff 'a b/1 2.BMP' b.png/1.pgm; do "
              "printf '%%s' \"$f\" > \"$f\"; done; touch b/noext b/x.jpgx b/readme.txt b/3.json top.csv; "
              "mkdir ../linked; echo 1 > ../linked/l.ppm; ln -s ../../linked b/z; ln -s ../linked zz; "
              "ln -s ../b/3.jpg __a__/l.jpeg");
    EXPECT_EXACTLY(0,
                   "__a__/l.jpeg=0 __a__/q.tiff=0 a b/1 2.BMP=1 b/3.jpg=2 b/3.png=2 b/cat.0.png=2 "
                   "b/cat.1.png=2 b/x.webp=2 b/x/y/3.JPG=2 b/z/l.ppm=2 b.png/1.pgm=3 zz/l.ppm=4 ",
                   LISTED, "c");
    EXPECT_PRINTS(0,
                  "c: skipped folders or images whose names begin with a dot (1; the first is b/.png.PNG); ",
                  "cat log");
    EXPECT(0, FILES "--data c");
    cr_expect_eq(number(out, 1, "items"), 12);
    EXPECT(0, FILES "--data c --member png");
    cr_expect_eq(number(out, 1, "items"), 3);
    expect_refused(2, "links back to one of its parent folders",
                   "ln -s .. c/b/up && $P --variant files --data c");
    EXPECT_PRINTS(
        1, "c/b/lost.jpg: a symbolic link to 'nothing', which cannot be opened: No such file or directory",
        "rm c/b/up && ln -s nothing c/b/lost.jpg && $P --variant files --data c");
    EXPECT_PRINTS(1, "c/b/pipe.jpg: not a regular file",
                  "rm c/b/lost.jpg && mkfifo c/b/pipe.jpg && $P --variant files --data c");
    EXPECT(0, FILES "--data c --on-error skip");
    cr_expect(number(out, 1, "items") == 12 && number(out, 1, "skipped") == 1, "%s", out);
}

/* Class folders are sorted as Python sorts their names: bytes that are not UTF-8 come between U+D7FF and
 * U+E000. */
Test(choice, class_folders_are_sorted_like_python_names)
{
    EXPECT(0, "mkdir c && cd c && for n in A b '\xc3\xa9' '\xee\x80\x80' '\xf0\x9f\x98\x80' '\xff' '\xc3' "
              "'a\xc3z' 'a\xc3\xa9'; do d=$(printf \"$n\") && mkdir \"$d\" && echo x > \"$d/1.png\"; done");
    EXPECT_EXACTLY(0, "9 True\n",
                   "$P --prepare p --from dataset --source c >log 2>&1 && mkdir x && tar xf p/*.tar -C x && "
                   "python3 -c \"import os\n"
                   "names = sorted(os.listdir('c'))\n"
                   "ours = open('p/classes.txt', errors='surrogateescape').read().split('\\n')[:-1]\n"
                   "labels = [open('x/%%06d.cls' %% i).read() for i in range(9)]\n"
                   "print(len(ours), ours == names and labels == [str(i) for i in range(9)])\"");
}

/* In flat folders, too, two images are two samples. Files with the rest of the name are their members. */
Test(choice, images_of_a_flat_folder_keep_their_own_members)
{
    EXPECT(
        0,
        "mkdir f && cd f && for n in 3.jpg 3.png a.b.png a.png; do printf $n > $n; done; for n in 3 a a.b; "
        "do echo '{\"label\": '${#n}'}' > $n.json; done; echo 5 > a.c.txt");
    EXPECT_EXACTLY(0, "000000,3.jpg,p/000000.jpg,p/000000.json,,\n",
                   "$P --prepare p --from dataset --source f --store files >log 2>&1 && sed -n "
                   "'1,2s:not-imagefolder/000:p:gp' p/samples.csv");
    EXPECT_EXACTLY(0, "3.jpg 3.png a.b.png a.png 1 1 3 1 ",
                   "tail -n +2 p/samples.csv | cut -d, -f2 | tr '\\n' ' '; for i in 0 1 2 3; do cat "
                   "p/*/000/00000$i.json | tr -dc 0-9; printf ' '; done");
    EXPECT(0, FILES "--data f");
    cr_expect_eq(number(out, 1, "items"), 4);
    cr_expect_float_eq(number(out, 1, "sample_bytes"), (5 + 5 + 7 + 5) / 4.0 + 13, 1e-9);
}

/* Creates 180 digits in the class folders t/0, t/1 and t/2. */
static void make_class_folders(void)
{
    EXPECT(0,
           "$P --prepare d --from digits --samples 180 --store files --encode npy && mkdir -p t/0 t/1 t/2 && "
           "for i in $(seq 0 179); do cp d/not-imagefolder/000/$(printf %%06d $i).npy t/$((i / 60)); done");
}

/* --permute writes each sample once, in an order that the seed selects, and mixes the classes. */
Test(choice, copies_are_permuted)
{
#define COPY "$P --prepare %s --from dataset --source t --permute %d --shards 2 >log"
    make_class_folders();
    EXPECT(0, COPY, "a", 7);
    EXPECT(0, COPY " && for f in a/*.tar a/samples.csv; do cmp $f b/${f#a/} || exit 1; done", "b", 7);
    EXPECT(1, COPY " && cmp a/dataset-000000.tar c/dataset-000000.tar", "c", 8);
    /* samples.csv names the file that each sample was copied from. */
    EXPECT(
        0,
        "mkdir x && for f in a/*.tar; do tar xf $f -C x; done && tail -n +2 a/samples.csv | cut -d, -f1,2 | "
        "while IFS=, read -r key from; do cmp t/$from x/$key.npy && [ ${from%%%%/*} = $(cat x/$key.cls) "
        "] "
        "|| exit 1; done");
    EXPECT_EXACTLY(0, "180\n", "tail -n +2 a/samples.csv | cut -d, -f2 | sort -u | wc -l");
    /* Counts the samples that follow a sample of their own class: about 59 in a random order, and 177 in the
     * order of the folders. */
    EXPECT(0, "tail -n +2 a/samples.csv | cut -d, -f2 | cut -c1 | awk '$1 == last {same++} {last = $1} END "
              "{exit same < 30 || same > 90}'");
    EXPECT(0, "$P --prepare d1 --from dataset --source t --permute 7 --samples 10 >log && "
              "head -n 11 a/samples.csv | cut -d, -f2 > wanted && cut -d, -f2 d1/samples.csv | cmp - wanted");
    expect_refused(2, "--permute=7 there, --permute=9 now",
                   "$P --prepare a --from dataset --source t --permute 9 --shards 2");
    expect_refused(2, "--permute would transfer a shard for each sample of a URL",
                   "$P --prepare e --from dataset --source http://127.0.0.1:1/x.tar --permute 1");
    expect_refused(2, "--permute: '0' is out of range",
                   "$P --prepare e --from dataset --source t --permute 0");
}

/* A few files outside the class folders, or of another kind, change nothing. */
Test(choice, stray_files_are_ignored_with_a_warning)
{
    make_class_folders();
    EXPECT(0, "cp -r t u && cd u && touch zlabels.csv Thumbs.db 1/readme.txt && cp 0/000000.npy aroot.npy");
    EXPECT_PRINTS(
        0,
        "u: ignored 4 of 184 files, which are not images in class folders; to read other files, such as "
        ".npy, name their extension with --image; the first is Thumbs.db\n",
        "$P --prepare o --from dataset --source u && tar tf o/dataset-000000.tar | grep -c cls");
    EXPECT_OUT("o: 180 samples", "\n180\n");
    expect_bytes(ARRAY, FILES "--data u", "--label folder --decode");
    cr_expect_eq(number(out, 1, "items"), 180);
    cr_expect_eq(loss_of("t"), loss_of("u"));
    /* Equal numbers of images inside and outside of folders. */
    EXPECT(0, "mkdir v && cp -r t/0 v && cp t/1/* v");
    EXPECT(0, FILES "--data v");
    cr_expect_eq(number(out, 1, "items"), 120);
    EXPECT_PRINTS(
        1, "folders are classes only in a folder without .tar files, with more images in its subfolders",
        "$P --variant files --data v --label folder");
}

/* A warning names the reason why folders of images are not read as classes. */
Test(choice, ignored_class_folders_are_reported)
{
    make_class_folders();
    EXPECT_PRINTS(0,
                  "t: the folders in it are not classes, because it has label files (1 for 180 images in "
                  "folders; the first is 1/000060.cls); for class folders, remove the .cls files",
                  "printf 1 > t/1/000060.cls && " FILES "--data t");
    EXPECT(0, "rm t/1/000060.cls && " FILES "--data t");
    cr_expect_not(says("warning: t:"), "%s", out);
    EXPECT_PRINTS(0, "t: only its shards are read, not its folders, such as ",
                  "cd t && tar cf x.tar 0 && cd .. && " SHARDS "--data t");
    cr_expect(says("; if the folders are classes, move the .tar files elsewhere, such as x.tar"), "%s", out);
    EXPECT_PRINTS(
        0,
        "t: the folders in it are not classes, because it has 120 images itself, and its folders only "
        "60; for class folders, move those images elsewhere (the first is 0",
        "rm t/x.tar && mv t/1/* t/2/* t && " FILES "--data t");
}

/* Files that were added to a prepared set are not in its index. */
Test(choice, added_files_of_prepared_sets_are_reported)
{
#ifdef HAVE_PNG
    EXPECT(0, "$P --prepare i --from digits --samples 30 --store imagefolder && " FILES "--data i");
    cr_expect_not(says("not read"), "%s", out);
    EXPECT_PRINTS(0, "i: files that are not in digits.index are not read (images that were added: 2)",
                  "mkdir i/new && cp i/0000/000000.png i/new && cp i/0000/000000.png i/0001/x.png && " FILES
                  "--data i");
#endif
    EXPECT(0, "$P --prepare s --from digits --samples 30 --encode npy && " SHARDS "--data s");
    cr_expect_not(says("not read"), "%s", out);
    EXPECT_PRINTS(0, "s: files that are not in digits.index are not read (shards that were added: 1)",
                  "cp s/digits-000000.tar s/more.tar && " SHARDS "--data s");
}

#ifdef HAVE_PNG
#define DRAW "$P --variant naive --formula segrcdb --classes 3 --res 16 --batch 3 --loops 1 --png "

/* A folder of --png, and shards of such files, are sets with masks. */
Test(choice, drawn_images_have_their_masks)
{
    EXPECT(0, DRAW "drawn && mkdir t && cd drawn && tar cf ../t/x.tar *.png && for i in 0 1 2; do mkdir -p "
                   "../sub/a ../sub/b; cp *-$i.png *-$i.mask.png ../sub/a; done");
    for (int d = 0; d < 2; d++) {
        const char *set = d ? "t" : "drawn";
        EXPECT(0, "$P --variant stream --data %s --decode --batch 3 " FAST, set);
        cr_expect(number(out, 1, "items") == 3 && !says("warning: drawn"), "%s", out);
        EXPECT(0,
               "$P --prepare p%d --from dataset --source %s --store imagefolder && for i in 0 1 2; do cmp "
               "p%d/image/00000$i.png drawn/*-$i.png && cmp p%d/mask/00000$i.png drawn/*-$i.mask.png || exit "
               "1; done",
               d, set, d, d);
    }
    expect_refused(2, "its samples have masks ('mask.png') instead of labels",
                   "$P --variant train-naive --data drawn");
    /* A JPEG file has a mask, too, and an image that has none is broken. The name of a mask may have a mask.
     */
    EXPECT(0, "cd drawn && cp class-0_instance-0.mask.png x.mask.mask.png && cp class-0_instance-0.png "
              "x.mask.jpg && cd .. && $P --variant files --data drawn --decode " FAST);
    cr_expect_eq(number(out, 1, "items"), 4, "%s", out);
    expect_refused(1, "it has no mask ('mask.png'), unlike other samples of the data set",
                   "cp drawn/class-0_instance-0.png drawn/y.png && $P --variant files --data drawn --decode");
    /* A mask of another size is an error also where masks are not delivered. */
    EXPECT(0,
           "rm drawn/[xy]* && $P --variant naive --formula segrcdb --res 18 --batch 1 --loops 1 --png other "
           "2>&1 && cp other/*.mask.png drawn/class-0_instance-0.mask.png");
    expect_refused(1, "its mask has 18 x 18 pixels, but its image has 16 x 16",
                   "$P --variant files-omp --data drawn --decode --out-res 8");
    expect_refused(1, "its mask has 18 x 18 pixels, but its image has 16 x 16; repair or remove this sample",
                   "$P --prepare q --from dataset --source drawn");
    EXPECT(0, "$P --variant files --data drawn --decode --on-error skip 2>/dev/null " FAST);
    cr_expect_eq(number(out, 1, "items"), 2, "%s", out);
}

/* Masks of no image are images. In class folders, and with chosen members, masks are images of their own. */
Test(choice, images_that_are_named_like_masks_are_pointed_out)
{
    EXPECT(0, DRAW "drawn && mkdir -p c/a c/b && cp drawn/*.png c/a && cp drawn/*.png c/b");
    EXPECT_PRINTS(0, "drawn: class-0_instance-0.mask.png has the name of a mask of class-0_instance-0.png",
                  "$P --variant files --data drawn --image png --decode " FAST);
    cr_expect_eq(number(out, 1, "items"), 6, "%s", out);
    EXPECT_PRINTS(0, "c: a/class-0_instance-0.mask.png has the name of a mask of a/class-0_instance-0.png",
                  "$P --variant files --data c --decode " FAST);
    cr_expect_eq(number(out, 1, "items"), 12, "%s", out);
    EXPECT(0, "rm drawn/*instance-?.png && $P --variant files --data drawn --decode " FAST);
    cr_expect(!says("has the name of a mask") && number(out, 1, "items") == 3, "%s", out);
}
#endif

/* The parts of a data set may have capitals. A class that is called train is no part. */
Test(choice, parts_of_data_sets_are_told_from_classes)
{
    make_class_folders();
    EXPECT(0, "mkdir two && cp -r t two/train && cp -r t two/val");
    const double loss = loss_of("two");
    EXPECT(0, "mv two/train two/Train && mv two/val two/Val");
    cr_expect_eq(loss_of("two"), loss);
    EXPECT_PRINTS(0, "two: its folders Train and Val become classes",
                  "$P --prepare p --from dataset --source two");
    EXPECT(0, "rm -r two/Val");
    expect_refused(
        2, "a data set 'Train' but no 'test' or 'val'; add the missing one, or name the folder two/Train",
        TRAIN "--data two");
    const double classes = loss_of("t");
    EXPECT(0, "mv t/2 t/train");
    cr_expect_eq(loss_of("t"), classes);
    EXPECT(0, "mkdir t/train/more && touch t/train/a.cls");
    expect_refused(2, "if 'train' is a class, read a copy by --prepare --from dataset", TRAIN "--data t");
}

/* From class folders, --train-size and --test-size take the first sample of every class, then the second, and
 * so on. */
Test(choice, sizes_take_the_classes_in_turn)
{
    make_class_folders();
    EXPECT(0, TRAIN "--data t --train-size 20 --test-size 4 --export-data e --dry-run");
    EXPECT_EXACTLY(0, "[7, 7, 6] True\n[2, 1, 1] True\n",
                   "python3 -c \"import json, struct\n"
                   "data = open('e', 'rb').read()\n"
                   "begin = 8 + struct.unpack('<Q', data[:8])[0]\n"
                   "for part in 'train', 'test':\n"
                   "    first, end = json.loads(data[8:begin])[part + '.labels']['data_offsets']\n"
                   "    labels = data[begin + first:begin + end:4]\n"
                   "    print([labels.count(c) for c in range(3)], list(labels) == sorted(labels))\"");
    EXPECT_PRINTS(0, "the test set has 1 class without a training sample; raise --train-size",
                  "$P --variant train-naive --model logreg --epochs 1 --batch 2 --data t --train-size 2");
    EXPECT_PRINTS(0, "--data t: all samples have class 0, so there is nothing to learn",
                  "rm -r t/1 t/2 && " TRAIN "--data t");
}

/* The number of a class folder is a label, so it must mean the same class in the training and the test set.
 */
Test(choice, training_and_test_sets_have_the_same_class_folders)
{
    make_class_folders();
    EXPECT(0, "mkdir two && cp -r t two/train && cp -r t two/val && rm -r two/val/1");
    expect_refused(2, "fdsl-bench: two/train has the class folder '1', but two/val does not",
                   TRAIN "--data two");
    EXPECT(0, "mkdir two/val/1 && " TRAIN "--data two"); /* this folder is empty */
    cr_expect_not(says("warning"), "%s", out);
    expect_refused(1, "two/train/00: the class folder has no image, so ImageFolder refuses the data set",
                   "mkdir two/train/00 two/val/00 && " TRAIN "--data two");
    EXPECT(0, TRAIN "--data two --on-error skip");
    cr_expect(says("--data two: the largest label is 3, so there are 4 classes; 1 of them has no sample (the "
                   "first: class 1)"),
              "%s", out);
    EXPECT(0, "rmdir two/train/00 two/val/00 && $P --prepare p --from dataset --source two");
    cr_expect(says("two: its folders train and val become classes"), "%s", out);
    EXPECT(0, "mv two/val/2 two/val/3");
    expect_refused(2, "two/train has the class folder '2', but two/val does not", TRAIN "--data two");
    EXPECT(0, "for f in two/val/*/*.npy; do echo 1 > ${f%%npy}cls; done && " TRAIN "--data two");
}

/* With --decode, a sample without an image is an error, or is skipped and counted. */
Test(choice, decoding_needs_an_image_in_each_sample)
{
    make_class_folders();
    EXPECT(0, "mkdir w && cp t/0/* w && echo x > w/0.tif");
    expect_refused(
        1, "w/0.tif: tif images cannot be decoded; convert them to PNG or JPEG, for example with mogrify",
        "$P --variant files --data w --image 'npy;tif' --decode --cache any");
    EXPECT(0, FILES "--data w --image 'npy;tif' --decode --on-error skip");
    cr_expect(number(out, 1, "items") == 60 && number(out, 1, "skipped") == 1, "%s", out);
    EXPECT_PRINTS(1, "w: ignored 60 of 61 files, which are not images; to read other files, such as .npy",
                  "$P --variant files --data w --decode --cache any");
    expect_refused(1, "--image jpg;jpeg;png;npy;ppm;bmp;pgm;tif;tiff;webp; its members are: cls",
                   "printf 1 > w/1.cls && $P --variant files --data w --decode --cache any");
}

#ifdef HAVE_JPEG
/* A random crop includes the damaged part of an image only in some runs, so different runs lose different
 * samples. */
Test(choice, samples_damaged_in_only_some_crops_are_skipped)
{
    EXPECT(0, "$P --prepare d --from digits --samples 20 --encode jpeg --store files && "
              "cd d && rm digits.index && for i in 03 04; do truncate -s -150 */000/0000$i.jpg; done");
    EXPECT(0, "$P --variant files,files-omp --data d --on-error skip --out-res 8 --fit random-resized-crop "
              "--cache any --warmup-time 0 --loops 60 --verify");
    cr_expect(says("000003.jpg: sample ") && says("000004.jpg: sample "), "%s", out);
    expect_refused(1, "Premature end of JPEG file; --on-error skip omits such samples",
                   "$P --variant files --data d --out-res 8 --cache any");
}

/* The advice about a broken sample is a value of --on-error that the variants accept. */
Test(choice, streams_do_not_advise_to_skip)
{
    EXPECT(0, "$P --prepare d --from digits --samples 20 --store shards --shards 2 && cd d && rm "
              "digits.index *.json "
              "&& mkdir ../e && tar --delete -f digits-000000.tar 000003.cls && cp *.tar ../e && "
              "truncate -s -2000 ../e/digits-000001.tar");
    expect_refused(1, "--on-error skip omits such samples", "$P --variant shards --data d --label cls");
    expect_refused(1, "--on-error mask gives such samples weight 0",
                   "$P --variant stream --data d --label cls --decode");
    cr_expect(!says("--on-error skip"), "%s", out);
    EXPECT(0, "$P --variant stream --data d --label cls --decode --on-error mask --batch 4 --cache any "
              "--min-samples 1 --max-time 0");
    EXPECT_PRINTS(1, "truncated", "$P --variant stream,shards --data e --decode");
    cr_expect(!says("--on-error"), "%s", out);
    expect_refused(1, "--on-error skip omits such samples", "$P --variant shards,shards-mmap --data e");
}

/* Files with zeros after their last code have all their pixels. Their warnings are counted per run. */
Test(choice, accepted_warnings_about_jpegs_are_counted)
{
    EXPECT(0,
           "$P --prepare d --from digits --samples 20 --encode jpeg --store files && cd d && rm digits.index "
           "&& for f in */000/00000[345].jpg; do { head -c -2 $f && head -c 30 /dev/zero && "
           "printf '\\377\\331'; } > new && mv new $f; done");
    EXPECT(0, FILES "--data d --decode --epochs 2");
    cr_expect(number(out, 1, "items") == 40 && number(out, 1, "jpeg_warnings") == 6, "%s", out);
    EXPECT(0, FILES "--data d --out-res 8");
    cr_expect(number(out, 1, "jpeg_warnings") == 3, "%s", out);
    EXPECT_PRINTS(0, "sum 3\n",
                  "$P --variant train-naive --model logreg --data d --dry-run 2>&1 | "
                  "awk '/accepted [0-9]+ warnings? of libjpeg/ { sub(/.*accepted /, \"\"); "
                  "sum += $1 } END { print \"sum\", sum }'");
}
#endif

/* ImageFolder sorts the names of the folders; the number of a folder is the label of its images. */
Test(choice, prepared_class_folders_have_the_labels_of_the_source)
{
#ifdef HAVE_PNG
    EXPECT_PRINTS(0, "h: 30 samples in 10 class folders, ",
                  "$P --prepare h --from digits --samples 30 --store imagefolder");
    EXPECT(0, "$P --prepare i --from digits --samples 1203 --store imagefolder && "
              "$P --prepare s --from digits --samples 1203");
    EXPECT(0, "cd i && n=0 && for f in */; do for x in $f*; do echo ${x%%.png},$n,$x; done; n=$((n + 1)); "
              "done | sort > ../ours && tail -n +2 samples.csv | sort | cmp - ../ours");
    EXPECT(0, FILES "--data i --decode");
    cr_expect_eq(loss_of("i"), loss_of("s"));
    EXPECT(0, "cp -r i j && rm j/0003/000013.png && $P --prepare j --from digits --samples 1203 --store "
              "imagefolder && diff -r i j");
    EXPECT(0, "$P --prepare k --from dataset --source s --store imagefolder && for c in i/0*; do diff -r $c "
              "k/${c#i/} || exit 1; done");
    EXPECT(0, "rm k/dataset.index && $P --prepare l --from dataset --source k --store imagefolder && "
              "for c in k/0*; do test $(ls $c | wc -l) = $(ls l/${c#k/} | wc -l) || exit 1; done");
    EXPECT(0,
           "mkdir gap && cp i/0002/000002.png i/0000/000000.png gap && echo 0 > gap/000000.cls && echo 2 > "
           "gap/000002.cls");
    expect_refused(2, "no sample has class 1, but one has class 2, so ImageFolder would number",
                   "$P --prepare q --from dataset --source gap --store imagefolder");
#endif
}

/* The folder decides the label in class folders, whatever a sidecar says, for each reader and writer. */
Test(choice, sidecars_do_not_change_the_label_of_a_class_folder)
{
    EXPECT(0,
           "mkdir -p s/cat s/dog && for c in cat dog; do for i in 1 2 3; do echo $c$i > s/$c/$i.jpg; done; "
           "done && echo '{\"label\": 1}' > s/cat/1.json && echo 1 > s/cat/2.txt");
    EXPECT_EXACTLY(
        0, "3 3\ncat\ndog\n",
        "$P --prepare p --from dataset --source s --store imagefolder >log 2>&1 && echo $(ls p/cat | wc "
        "-l) $(ls p/dog | wc -l) && cat p/classes.txt");
    EXPECT_EXACTLY(0, "000111",
                   "$P --prepare q --from dataset --source s --store files >log 2>&1 && cat q/*/*/*.cls");
    EXPECT_EXACTLY(0, "{\"label\": 1}\n1\n", "cat q/*/*/*.json q/*/*/*.txt");
    EXPECT(0,
           "echo '{\"label\": 1}' | tee s/cat/2.json s/cat/3.json s/dog/1.json s/dog/2.json > s/dog/3.json");
    EXPECT_EXACTLY(
        1, "",
        "$P --prepare r --from dataset --source s --label json:label >log 2>&1 && tar tf r/*.tar | "
        "grep cls");
#ifdef HAVE_JANSSON
    EXPECT_PRINTS(2, "no sample has class 0, but one has class 1",
                  "$P --prepare t --from dataset --source s --label json:label --store imagefolder");
#endif
}

/* The lists of classes of prepared sets are compared, too: without the class 1 in the test set, its labels
 * would mean other classes. */
Test(choice, prepared_sets_have_the_same_classes)
{
    static const char *const stores[] = {"shards", "files"};
    make_class_folders();
    EXPECT(0, "cp -r t few && rm -r few/1 && cp -r t first && rm -r first/2 && mkdir two");
    for (size_t i = 0; i < COUNT_OF(stores); i++) {
        EXPECT(
            0,
            "rm -rf two/*; for n in t few first; do $P --prepare two/$n --from dataset --source $n --store "
            "%s || exit 1; done; mv two/t two/train; mv two/few two/val",
            stores[i]);
        expect_refused(2, "class 1 is '1' in two/train, but '2' in two/val; labels are the numbers of the",
                       TRAIN "--data two");
        EXPECT(0, "mv two/val two/few && mv two/first two/val && " TRAIN "--data two");
        EXPECT(0, "rm -r two/val && mv two/few two/val && rm two/val/classes.txt && " TRAIN "--data two");
    }
}

/* A set of class folders is compared with a prepared set, and a class without a sample keeps its number in a
 * copy: a small test set need not have all classes. */
Test(choice, empty_classes_keep_their_numbers_in_copies)
{
    static const char *const stores[] = {"shards", "files"};
    make_class_folders();
    EXPECT(0,
           "cp -r t few && rm -r few/1 && mkdir two && $P --prepare two/train --from dataset --source t && "
           "cp -r few two/val");
    expect_refused(2, "class 1 is '1' in two/train, but '2' in two/val; labels are the numbers of the",
                   TRAIN "--data two");
    EXPECT(0, "mkdir two/val/1 few/1 && " TRAIN "--data two");
    for (size_t i = 0; i < COUNT_OF(stores); i++) {
        EXPECT_PRINTS(0,
                      "warning: few/1: the class folder has no image (1 such folder); the copy has no sample "
                      "of this class, but keeps its number",
                      "rm -rf two/val && $P --prepare two/val --from dataset --source few --store %s",
                      stores[i]);
        EXPECT_EXACTLY(0, "0\n1\n2\n", "cat two/val/classes.txt");
        EXPECT(0, TRAIN "--data two");
    }
    EXPECT_EXACTLY(0, "60 60\n",
                   "cat two/val/*/*/*.cls | sed 's/./&\\n/g' | sort | uniq -c | awk '$2 != \"\" "
                   "{ printf \"%%s%%s\", $2 == 2 ? \" \" : \"\", $1 } END { print \"\" }'");
    expect_refused(1, "or copy the data set with --prepare --store shards, which keeps the numbers",
                   "$P --prepare q --from dataset --source few --store imagefolder");
    EXPECT(1, "test -e q");
}

#ifdef HAVE_JANSSON
/* A label that --label chose is the label that readers of the copy find, whatever the source has besides. */
Test(choice, chosen_labels_are_kept_by_copies)
{
    static const char *const stores[] = {"shards", "files"};
    EXPECT(0, "$P --prepare d --from digits --samples 30 --encode npy --store files && mkdir f && cd f && "
              "for i in $(seq 100 129); do cp ../d/*/000/000000.npy $i.npy; echo $((i %% 5)) > $i.cls; "
              "echo $((i %% 4)) > $i.num; printf '{\"label\": %%d, \"class\": {\"id\": %%d}}' $((i %% 7)) "
              "$((i %% 3)) > $i.json; done");
    for (size_t i = 0; i < COUNT_OF(stores); i++) {
        EXPECT(0,
               "rm -rf p q r; $P --prepare p --from dataset --source f --label json:class.id --store %s && "
               "$P --prepare q --from dataset --source p --store files && "
               "$P --prepare r --from dataset --source f --label num --store %s && mkdir x && "
               "if ls r/*.tar; then tar xf r/*.tar -C x; else cp r/*/000/* x; fi",
               stores[i], stores[i]);
        EXPECT_EXACTLY(0, "120120120120120120120120120120", "cat q/*/000/*.cls");
        EXPECT_EXACTLY(0, "012301230123012301230123012301", "cat x/*.cls && rm -r x");
        EXPECT(0, TRAIN "--data p");
        cr_expect_eq(number(out, 1, "parameters"), 3 * (28 * 28 + 1));
    }
    /* No second label where readers find the chosen one anyway. */
    EXPECT_EXACTLY(0, "",
                   "$P --prepare s --from dataset --source f --label json:label >log && tar tf s/*.tar | "
                   "grep cls; true");
    expect_refused(1, "sample '100': its json has no field 'x'",
                   "$P --prepare t --from dataset --source f --label json:x");
}
#endif

/* The names of classes survive any number of copies. */
Test(choice, class_names_are_kept_by_copies)
{
    EXPECT(0,
           "mkdir -p 's/red panda' s/ant s/__a__ && for c in 'red panda' ant __a__; do for i in 0 1; do echo "
           "$c$i > \"s/$c/$i.x.JPG\"; done; done");
    EXPECT(
        0,
        "from=s; n=0; for store in files imagefolder shards imagefolder; do n=$((n + 1)); $P --prepare c$n "
        "--from dataset --source $from --store $store >log 2>&1 || exit 1; from=c$n; done; diff -r c2 c4");
    EXPECT_EXACTLY(0, "__a__\nant\nred panda\n", "cat c3/classes.txt");
    EXPECT_EXACTLY(0, "red panda0\nred panda1\n", "cat c4/red*/*");
    EXPECT(0, "for i in 1 2 3 4; do cmp c1/classes.txt c$i/classes.txt || exit 1; done");
    /* Without the index, and as another program sees it. */
    EXPECT(
        0,
        "rm c4/dataset.index && $P --prepare c5 --from dataset --source c4 --store imagefolder >log 2>&1 && "
        "diff -r c4/ant c5/ant && cmp c4/classes.txt c5/classes.txt");
    EXPECT_PRINTS(
        0, "writing the lists again",
        "rm c2/classes.txt && $P --prepare c2 --from dataset --source c1 --store imagefolder && cmp "
        "c1/classes.txt c2/classes.txt");
    /* Classes of another name are another set. */
    EXPECT_PRINTS(2, "c6 was prepared from other files",
                  "cp -r c1 d && $P --prepare c6 --from dataset --source d >log 2>&1 && sed -i s/ant/bee/ "
                  "d/classes.txt "
                  "&& $P --prepare c6 --from dataset --source d");
}

/* Names that are no folder names, or would be sorted in another order, are replaced by numbers. */
Test(choice, unusable_class_names_become_numbers)
{
    static const char *const names[][2] = {
        {"a/b\\nc\\nd\\n", "'a/b' (class 0) is not a usable name"},
        {"a\\n..\\nd\\n", "'..' (class 1) is not a usable name"},
        {"a\\n\\nd\\n", "'' (class 1) is not a usable name"},
        {"a\\n.b\\nd\\n", "'.b' (class 1) is not a usable name"},
        {"a\\nclasses.txt\\nd\\n", "is the name of a file of the data set"},
        {"a\\ndataset.index\\nz\\n", "is the name of a file of the data set"},
        {"a\\nc\\nb\\n", "'b' (class 2) does not follow the name before it"},
        {"a\\nb\\nb\\n", "'b' (class 2) does not follow the name before it"},
        {"a\\nb\\n", "class that classes.txt does not list"},
        {"a\\nb\\tc\\nd\\n", "has a control character"}};
    EXPECT(0,
           "mkdir -p s/a s/b s/c && for c in a b c; do echo $c > s/$c/1.jpg; done && $P --prepare p --from "
           "dataset --source s");
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        EXPECT_PRINTS(
            0, names[i][1],
            "printf '%s' > p/classes.txt && rm -rf q && $P --prepare q --from dataset --source p --store "
            "imagefolder",
            names[i][0]);
        EXPECT_EXACTLY(0, "a\nb\nc\n", "cat q/0000/* q/0001/* q/0002/*");
    }
    EXPECT_EXACTLY(0, "0000\n0001\n0002\n", "cat q/classes.txt");
}

/* The same seed gives the same trees. make fuzz tries others. */
Test(choice, random_trees_are_read_as_image_folder_reads_them)
{
    EXPECT_PRINTS(0, "60 trees are read as ImageFolder reads them",
                  "python3 %s/tests/fuzz_folders.py $P --seed 1 --cases 60", root);
}

Test(choice, sets_without_classes_are_not_written_as_class_folders)
{
    expect_refused(2, "--store imagefolder needs labels, and --from counter has none",
                   "$P --prepare q --from counter --classes 0 --samples 3 --store imagefolder");
    expect_refused(1, "needs an image that ImageFolder reads (jpg;jpeg;png;",
                   "$P --prepare q --from digits --samples 30 --encode npy --store imagefolder");
    EXPECT(1, "test -e q");
}

/* In a set of --store files, a reader of class folders finds a single class. Sets of older versions have the
 * folders 000, 001, ... at the top level, and must not be read as class folders. */
Test(choice, files_are_not_mistaken_for_class_folders)
{
    EXPECT_PRINTS(0, "folders: f/not-imagefolder/\n",
                  "$P --prepare f --from digits --samples 1003 --encode npy --store files && rm f/*.index "
                  "&& echo folders: f/*/");
    EXPECT(0, "mkdir g && mv f/not-imagefolder/* g/ && " FILES "--data g");
    EXPECT(0, TRAIN "--data g && rm -r f");
    cr_expect_eq(number(out, 1, "parameters"), 7850);
}
#endif
