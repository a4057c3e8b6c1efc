/* A stand-in for the published program of this name, for tests: its constants. tests/data/published/nvcc.sh
 * makes of them a program that prints a time. */
int main()
{
    constexpr int nvertex = 1000;
    constexpr int norbits = 200;
    constexpr int res = 1024;
    const int N = 128;
}
