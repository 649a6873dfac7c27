"""Model names and their grammar."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitray.config.model_names import STEMS, WIDTHS, Name, parse_name


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("stem", STEMS)
def test_names_round_trip_over_a_grid(width, stem):
    for depth in (1, 12, 36):
        for branches in (1, 2, 9):
            for patch in (16,) if stem.startswith("conv") else (8, 16, 32) if stem == "local" else (4, 8, 16, 32):
                tail = "" if stem == "linear" else f"_{stem}"
                name = f"vit_{width}{depth}x{branches}_{patch}{tail}"
                assert str(parse_name(name)) == name


@given(st.text(max_size=30))
def test_any_text_is_a_name_or_refused_with_a_reason(text):
    try:
        name = parse_name(text)
    except ValueError as refused:
        message = str(refused)
    else:
        message = f"model name {text!r}" if parse_name(str(name)) == name else ""
    assert message.startswith(f"model name {text!r}")


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("ViT-B18x2/16", "vit_b18x2_16"),
        ("ViT-B18×2", "vit_b18x2_16"),
        ("S36x1", "vit_s36x1_16"),
        ("S20×3", "vit_s20x3_16"),
        ("ViT-B24", "vit_b24x1_16"),
        ("ViT-Ti/16", "vit_ti12x1_16"),
        ("ViT-L/32", "vit_l24x1_32"),
        ("H/14", "vit_h32x1_14"),
        ("vit_b_16", "vit_b12x1_16"),
        ("vit_ti12x1_16_hmlp", "vit_ti12x1_16_hmlp_bn"),
        ("ViT-B12/16-conv-bn", "vit_b12x1_16_conv"),
        ("M/16", "vit_m12x1_16"),
        ("vit_w832d12x1_16", "vit_w832d12x1_16"),
        ("ViT-W832d18x2/14", "vit_w832d18x2_14"),
        ("vit_w512d12x1_16", "vit_m12x1_16"),  # the letter, because its heads are the same
        ("vit_w1280d12x1_16", "vit_w1280d12x1_16"),  # h has 16 heads, not 20
        ("vit_w64d12x1_16", "vit_w64d12x1_16"),  # u has 2 heads, not 1
    ],
)
def test_the_papers_spellings_give_the_same_name(spelling, name):
    assert str(parse_name(spelling)) == name


def test_a_name_has_a_shape():
    assert parse_name("vit_b18x2_16_hmlp_ln") == Name("b", 18, 2, 16, "hmlp_ln")
    assert (parse_name("L/16").size, parse_name("L/16").heads) == (1024, 16)
    assert (parse_name("vit_w832d12x1_16").size, parse_name("vit_w832d12x1_16").heads) == (832, 13)
    assert parse_name("vit_ti12x1_16").paper_spelling == "ViT-Ti12x1/16"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("vit_q12x1_16", "width 'q' is not one of u (64), ti (192)"),
        ("vit_tu12x1_16", "did you mean u"),
        ("vit_w800d12x1_16", "nor w<channels>d with a multiple of 64"),
        ("vit_w832x1_16", "width 'w' is not one of"),
        ("vit_w9999936d12x1_16", "width 'w9999936d' is not one of"),
        ("vit_b0x1_16", "depth is 0, expected at least 1"),
        ("vit_b12x0_16", "branches is 0"),
        ("vit_b12x1_0", "patch is 0"),
        ("vit_b12x1_1a", "patch '1a' is not a whole number"),
        ("vit_b12x1_16_hmpl_bn", "stem 'hmpl_bn' is not one of linear, linear_bn"),
        ("vit_b12x1_16_hmpl_bn", "did you mean hmlp_bn"),
        ("vit_b12x1_14_hmlp_bn", "patches of 4, 8, 16, 32, ... (4 x 2^k), not 14"),
        ("vit_b12x1_12_hmlp_ln", "patches of 4, 8, 16"),
        ("vit_b12x1_4_local", "the local stem has patches of 8, 16, 32, ... (cells of 4 x 4, merged in pairs), not 4"),
        ("vit_b12x1_24_local", "patches of 8, 16, 32"),
        ("vit_b12x1_16_locale", "did you mean local"),
        ("vit_b12x1_8_conv", "its patch is 16, not 8"),
        ("", "cannot read ''"),
        ("b12x", "cannot read 'b12x'"),
    ],
)
def test_an_impossible_name_is_refused_with_the_wrong_part(name, wrong):
    with pytest.raises(ValueError, match="model name") as error:
        parse_name(name)
    assert wrong in str(error.value)
