/* Replaces the published program of this name in tests. It has only the constants, from which
 * tests/data/published/nvcc.sh writes a program that prints a time. */
int main()
{
    constexpr int nvertex = 1000;
    constexpr int norbits = 200;
    constexpr int res = 1024;
    const int N = 128;
}
