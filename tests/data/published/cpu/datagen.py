"""Replaces the published module of this name in tests. It has the same interface, and reports 1 µs per vertex of an image."""


class OriSyntDatasetClass:
    factor = 1e-6

    def __init__(self, image_size, vertex_number, perlin_noise_coefficient, line_width, start_rad, line_draw_num, nami1, nami2,
                 oval_rate_x, oval_rate_y):
        self.vertex_number = vertex_number
        assert (perlin_noise_coefficient, line_width, start_rad, line_draw_num) == (2.0, 0.002, 25, 200)
        assert (nami1, nami2, oval_rate_x, oval_rate_y, image_size > 0) == (5, 8, 1.2, 1.8, True)

    def gen_image(self, idx, profile=False):
        return None, self.factor * self.vertex_number * (1 + 0.01 * idx)


class OptimSyntDatasetClass(OriSyntDatasetClass):
    factor = 0.5e-6
