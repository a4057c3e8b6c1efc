/* Tests labels that are words, tables of labels (--labels), and patterns that choose members (--image
 * '*.jpg'). */
#include "shell.h"

#include "cells.h"

#if defined(HAVE_XXHASH) && defined(HAVE_PNG)

TestSuite(label_names, .init = shell_set_up, .fini = shell_tear_down, .timeout = 240);

#define FAST    "--cache any --warmup-time 0 --min-time 0 --max-time 0 --min-samples 2 --format csv --verify "
#define TRAIN   "$P --variant train-naive --model logreg --epochs 2 --format csv --batch 7 "
#define STREAM  "$P --variant stream,shards-omp --decode " FAST
#define DIGITS  53 /* a prime, so that neither batches nor shards are full */
#define CLASSES 10

/* Writes digits as files with integers (n), with words (w) and with words in JSON (j), and without labels
 * (o). The order of the words is that of the integers. The folders have two shards each. */
static void make_sets(void)
{
    EXPECT(
        0,
        "$P --prepare d --from digits --samples %d --store files && mkdir n w j o && cd n && "
        "cp ../d/not-imagefolder/000/*.png ../d/not-imagefolder/000/*.cls . && for c in *.cls; do "
        "k=${c%%.cls}; v=$(cat $c); printf ' class %%d\\n' $v > ../w/$k.txt; cp $k.png ../w; cp $k.png ../o; "
        "printf '{\"a\": {\"name\": \"class %%d\"}}' $v > ../j/$k.json; cp $k.png ../j; done && cd .. && "
        "(echo 'split,name,label' && cd n && for c in *.cls; do "
        "echo \"train,${c%%.cls},$(cat $c)\"; done) > numbers.csv && "
        "(echo 'name,\"label\"' && cd n && for c in *.cls; do "
        "printf '%%s,\"class %%d\"\\r\\n' ${c%%.cls}.png $(cat $c); done) > words.csv && "
        "for s in n w j o; do mkdir s$s && (cd $s && tar cf ../s$s/a.tar --sort=name 00000* && "
        "tar cf ../s$s/b.tar --sort=name --exclude '00000*' *); done",
        DIGITS);
}

/* Trains with these options. Copies what the results of all epochs are. */
static void copy_results(const char *options, char *text, size_t size)
{
    static const char *const columns[] = {"train_loss", "train_acc", "test_loss", "test_acc", "items"};
    EXPECT(0, TRAIN "%s", options);
    *text = '\0';
    for (size_t epoch = 1; epoch <= 2; epoch++)
        for (size_t c = 0; c < COUNT_OF(columns); c++) {
            strncat(text, value(out, epoch, columns[c]), size - strlen(text) - 2);
            strcat(text, " ");
        }
}

static void expect_same(const char *one, const char *other)
{
    static char first[1024], second[1024];
    copy_results(one, first, sizeof first);
    copy_results(other, second, sizeof second);
    cr_expect(strlen(first) > 20);
    cr_expect_str_eq(first, second, "'%s' and '%s'", one, other);
}

/* Words and tables give each sample the label that integers give it, in shards and in files. */
Test(label_names, words_and_tables_train_as_integers_do)
{
    make_sets();
    expect_same("--data sn", "--data sw");
    expect_same("--data n", "--data w");
    expect_same("--data sn", "--data so --labels numbers.csv");
    expect_same("--data n", "--data o --labels words.csv");
    expect_same("--data sn --feed load", "--data sw --feed load");
    expect_same("--data sn --feed load", "--data so --feed load --labels words.csv");
#ifdef HAVE_JANSSON
    expect_same("--data sn", "--data sj --label json:a.name");
#endif
}

/* A test set may lack classes: its words have the numbers of the training set. */
Test(label_names, a_test_set_has_the_words_of_the_training_set)
{
    make_sets();
    EXPECT(0, "mkdir few nfew && cd w && rm $(grep -l 'class [0468]' *.txt) && for c in *.txt; do "
              "cp ${c%%.txt}.png $c ../few; cp ../n/${c%%.txt}.png ../n/${c%%.txt}.cls ../nfew; done");
    expect_same("--data sn --test-data nfew", "--data sw --test-data few");
    EXPECT(0, "echo other > $(ls few/*.txt | head -1)");
    expect_refused(2,
                   "few has the label 'other', but sw does not; labels are the numbers of the sorted words",
                   TRAIN "--data sw --test-data few");
    EXPECT_PRINTS(2, "the labels of sw are words, but those of nfew are integers",
                  TRAIN "--data sw --test-data nfew");
}

/* Streams deliver the words' numbers; a copy keeps the names of the classes. */
Test(label_names, streams_and_copies_know_the_words)
{
    make_sets();
    EXPECT(0, STREAM "--data sw");
    for (size_t row = 1; row <= 2; row++)
        cr_expect_eq(number(out, row, "items"), DIGITS);
    EXPECT(0, STREAM "--data so --labels words.csv");
    cr_expect_str_eq(value(out, 1, "labels"), "words.csv");
    EXPECT_EXACTLY(
        0, "class 0\nclass 1\nclass 2\nclass 3\nclass 4\nclass 5\nclass 6\nclass 7\nclass 8\nclass 9\n",
        "$P --prepare p --from dataset --source sw --label txt >says && cat p/classes.txt");
    expect_same("--data sn", "--data p");
    EXPECT(0, "$P --prepare q --from dataset --source so --labels numbers.csv --image png");
    expect_same("--data sn", "--data q");
}

/* classes.txt beside the shards numbers the words. */
Test(label_names, a_list_of_classes_numbers_the_words)
{
    make_sets();
    EXPECT(0, "for c in 9 8 7 6 5 4 3 2 1 0; do echo class $c; done > sw/classes.txt && mkdir r && cd n && "
              "for c in *.cls; do echo $((9 - $(cat $c))) > ../r/$c; cp ${c%%.cls}.png ../r; done && mkdir "
              "../sr && "
              "cd ../r && tar cf ../sr/a.tar --sort=name 00000* && tar cf ../sr/b.tar --sort=name "
              "--exclude '00000*' *");
    expect_same("--data sr", "--data sw");
    EXPECT(0, "cp sw/classes.txt so");
    expect_same("--data sr", "--data so --labels words.csv");
    EXPECT(0, "sed -i '/class 3/d' so/classes.txt");
    EXPECT_PRINTS(1, "the label 'class 3' is not in classes.txt", TRAIN "--data so --labels words.csv");
}

Test(label_names, faults_in_words_are_named)
{
    make_sets();
    EXPECT(0, "cp -r w x && echo 3 > x/000007.txt");
    EXPECT_PRINTS(
        1, "the label of sample '000007.png' is the integer 3, but that of sample '000000.png' is a word",
        TRAIN "--data x");
    EXPECT(0, "cp -r w y && printf '%%065d' 0 | tr 0 a > y/000007.txt");
    EXPECT_PRINTS(1, "y/000007.png: its txt is not a label", TRAIN "--data y");
    EXPECT(0, "cp -r n z && echo dog > z/000007.cls");
    EXPECT_PRINTS(1,
                  "its cls is not a label: a label is a decimal integer of 32 bits, or in all "
                  "samples a word",
                  TRAIN "--data z");
    EXPECT(0, "cd w && for c in *.txt; do echo caption $c > $c; done");
    EXPECT_PRINTS(0, "each of the 53 samples has another word as its label, such as 'caption 000000.txt'",
                  "$P --variant stream --decode " FAST "--data w 2>&1");
    EXPECT(0, "$P --variant shards-omp " FAST "--data sw"); /* the labels are not needed */
}

Test(label_names, faults_in_tables_are_named)
{
#define WITH TRAIN "--data so --labels t.csv"
    make_sets();
    EXPECT_PRINTS(1, "absent.csv", TRAIN "--data so --labels absent.csv");
    EXPECT(0, "sed 1d numbers.csv > t.csv");
    EXPECT_PRINTS(1, "t.csv: the first line has no columns 'name' and 'label'", WITH);
    EXPECT(0, "sed 5d numbers.csv > t.csv");
    EXPECT_PRINTS(1, "sample '000003': t.csv has no line for it", WITH);
    EXPECT(0, TRAIN "--data so --labels t.csv --on-error skip");
    EXPECT(0, "sed '5s/,[0-9]*$/,x/' numbers.csv > t.csv");
    EXPECT_PRINTS(1, "t.csv: line 5: the label 'x' is a word, but that of line 2 is an integer", WITH);
    EXPECT(0, "sed '5s/,[0-9]*$/,-1/' numbers.csv > t.csv");
    EXPECT_PRINTS(1, "t.csv: line 5: the label '-1' is negative", WITH);
    EXPECT(0, "sed '5s/000003/000002/' numbers.csv > t.csv");
    EXPECT_PRINTS(1, "t.csv: lines 4 and 5 have the same name '000002'", WITH);
    EXPECT(0, "(cat numbers.csv; echo train,000002.png,1) > t.csv");
    EXPECT_PRINTS(1, "are for the same sample '000002'", WITH);
    EXPECT(0, "sed '5s/000003/\"000003/' numbers.csv > t.csv");
    EXPECT_PRINTS(1, "it lacks a name or a label, or a quote", WITH);
    EXPECT_PRINTS(2, "--labels numbers.csv has the labels of images; drop --label",
                  TRAIN "--data so --labels numbers.csv --label cls");
    EXPECT_PRINTS(0, "1 of 54 lines are for no sample",
                  "(cat numbers.csv; echo train,other,1) > t.csv && " WITH " 2>&1");
    /* One key in two shards needs the names of the shards. */
    EXPECT(0, "cp so/a.tar so/c.tar");
    EXPECT_PRINTS(
        1, "line 2: the samples '000000' and '000000' (c.tar) both have this name; write SHARD.tar/KEY",
        TRAIN "--data so --labels numbers.csv");
    EXPECT(0, "sed '2,11s/,/,a.tar\\//' numbers.csv > t.csv && sed -n '2,11s/,/,c.tar\\//p' numbers.csv >> "
              "t.csv && " WITH);
#undef WITH
}

/* A pattern matches the extension in shards, and the name of a file in folders. */
Test(label_names, patterns_choose_members)
{
    make_sets();
    EXPECT(0, "mkdir l sl f && cd n && for c in *.cls; do k=${c%%.cls}; cp $k.png ../l/$k.left_eye.png; "
              "cp 000000.png ../l/$k.right_eye.png; cp $c ../l; mkdir -p ../f/$(cat $c); "
              "cp $k.png ../f/$(cat $c)/${k}_rgb.png; cp 000000.png ../f/$(cat $c)/${k}_depth.png; done && "
              "cd ../l && tar cf ../sl/a.tar --sort=name 00000* && tar cf ../sl/b.tar --sort=name "
              "--exclude '00000*' *");
    expect_same("--data sn", "--data sl --image 'left*.png' --label cls");
    expect_same("--data sn", "--data sn --image '*.PNG'");
    expect_same("--data sn --feed load", "--data sl --feed load --image 'png;[l]*.png' --label '*.cls'");
    EXPECT_PRINTS(
        1, "--image *.png matches several of its members: left_eye.png and right_eye.png; use a narrower",
        TRAIN "--data sl --image '*.png' --label cls");
    EXPECT_PRINTS(1, "it has no member for --image *.jpg", TRAIN "--data sl --image '*.jpg' --label cls");
    EXPECT(0, "$P --variant files,files-omp,stream --decode " FAST "--data f --image '*_rgb.png'");
    for (size_t row = 1; row <= 3; row++)
        cr_expect_eq(number(out, row, "items"), DIGITS);
    EXPECT(0, "mkdir g && cp -r f/* g && rm g/*/*_depth.png");
    expect_same("--data g", "--data f --image '*_rgb.png'");
    expect_same("--data g --feed load", "--data f --feed load --image '*_rgb.png'");
}

/* The set of benchmarks with labels: the tensors are the same, and it can be trained on. */
Test(label_names, the_default_set_has_labels)
{
    static const char *const labels = "0 1 2 3 4 0 1 2 3 4 0 1 2 ";
    EXPECT(0, "$P --prepare c --samples 13 --sample-shape 1,4,8,8 --classes 5 --store files && "
              "$P --prepare n --samples 13 --sample-shape 1,4,8,8 --classes 0 --store files && "
              "$P --prepare s --samples 40 --sample-shape 1,4,8,8 --shards 3");
    EXPECT_EXACTLY(0, labels, "cat $(ls c/*/*/*.cls c/*/*.cls 2>/dev/null) | tr -d '\\n' | sed 's/./& /g'");
    EXPECT(0, "for f in $(cd n && find . -name '*.npy'); do cmp n/$f c/$f || exit 1; done && "
              "test $(find c -name '*.npy' | wc -l) = 13 && ! find n -name '*.cls' | grep .");
    EXPECT(0, "$P --variant shards,shards-omp,shards-mmap " FAST "--data s");
    cr_expect_eq(number(out, 1, "sample_bytes"), 128 + 2 * 256 + 1);
    EXPECT(0, "$P --variant train-naive --model cnn3d --epochs 1 --batch 7 --format csv --data s");
    cr_expect_eq(number(out, 1, "items"), 30); /* of each of ten classes, one sample is held out */
}

#endif
