"""What each kind of feature computes, in examples; and what is refused, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from shoal.data import FeatureSet, FeatureSpec, Recipe, encode, model_inputs, sequence_group
from shoal.data.feature_set import Boundaries, ElementWise, HashBuckets, Range, Vocabulary
from shoal.data.kinds import (
    BoolMask,
    Combo,
    Expression,
    Id,
    KvDot,
    MapLookup,
    Match,
    Overlap,
    Raw,
    Tokenize,
    cross,
)
from shoal.errors import ConfigError, DataError, ShoalError, UnknownName
from shoal.ids import ids_of_text

MAP = pa.map_(pa.string(), pa.float64())


def table(**columns: Any) -> pa.Table:
    return pa.table(columns)


def ids(rows: pa.Table, kind: Any, **settings: Any) -> list[list[int]]:
    spec = FeatureSpec(name="f", kind=kind, **settings)
    return FeatureSet((spec,))(rows).ids.to_lists()["f"]


def dense(rows: pa.Table, kind: Any, **settings: Any) -> Any:
    spec = FeatureSpec(name="f", kind=kind, **settings)
    other = FeatureSpec(name="row", kind=Id())
    found = FeatureSet((spec, other))(rows.append_column("row", [range(len(rows))])).dense
    assert found is not None
    return found.tolist() if found.shape[1] > 1 else found[:, 0].tolist()


def text(*words: str) -> list[int]:
    return ids_of_text(list(words)).tolist()


class TestIds:
    def test_text_and_integers(self) -> None:
        rows = table(f=["x", "12"], n=[3, 4])
        assert ids(rows, Id()) == [text("x"), [12]]
        assert ids(rows, Id(column="n")) == [[3], [4]]

    def test_missing_values(self) -> None:
        rows = table(f=["x", None])
        with pytest.raises(DataError, match=r"column 'f' for feature 'f' in row 1.*default"):
            ids(rows, Id())
        assert ids(rows, Id(), default="y") == [text("x"), text("y")]
        longer = table(f=["left out", None, "z", None, ""]).slice(1)
        assert ids(longer, Id(), default="5") == [[5], text("z"), [5], text("")]
        assert ids(rows, Id(), default="") == [text("x"), []]
        assert ids(table(f=pa.array([1, None])), Id(), default=7) == [[1], [7]]
        assert ids(table(f=pa.nulls(2)), Id(), default=7) == [[7], [7]]

    def test_lists_and_separators(self) -> None:
        rows = table(f=["a|b", "", None, "c"], n=pa.array([[1, 2], [], None, [3]]))
        expected = [text("a", "b"), [], [], text("c")]
        assert ids(rows, Id(), separator="|") == expected
        assert ids(rows, Id(column="n")) == [[1, 2], [], [], [3]]
        assert ids(rows, Id(column="n"), default=9) == [[1, 2], [9], [9], [3]]
        with pytest.raises(DataError, match=r"row 0.*2 ids.*at most 1"):
            ids(rows, Id(column="n"), max_length=1)
        with pytest.raises(DataError, match=r"'n' for feature 'f' in row 1.*null"):
            ids(table(n=[[1], [2, None]]), Id(column="n"))

    @pytest.mark.parametrize(
        "column",
        [
            pa.array(["a:0.5|b:2", "", "c:1"]),
            pa.array([["a:0.5", "b:2"], [], ["c:1"]]),
            pa.array([[("a", 0.5), ("b", 2.0)], None, [("c", 1.0)]], MAP),
        ],
        ids=["text", "lists", "map"],
    )
    def test_weights(self, column: pa.Array) -> None:
        specs = (
            FeatureSpec(name="plain", kind=Id(column="n")),
            FeatureSpec(name="w", kind=Id(column="w", weighted=True), separator="|"),
        )
        found = FeatureSet(specs)(table(w=column, n=[1, 2, 3])).ids
        assert found.to_lists()["w"] == [text("a", "b"), [], text("c")]
        assert found.weights_of("w").tolist() == [0.5, 2.0, 1.0]  # type: ignore[union-attr]
        assert found.weights_of("plain").tolist() == [1, 1, 1]  # type: ignore[union-attr]
        # The same in batches for training, in any order and joined.
        recipe = Recipe(ids=(), label="y", computed=FeatureSet(specs))
        source = encode(table(w=column, n=[1, 2, 3], y=[0, 1, 0]), recipe, "here")
        taken = source.select(torch.tensor([2, 0])).take(torch.tensor([1, 0])).ids
        assert taken.to_lists()["w"] == [text("a", "b"), text("c")]
        assert taken.weights_of("w").tolist() == [0.5, 2.0, 1.0]  # type: ignore[union-attr]
        assert taken.weights_of("plain").tolist() == [1, 1]  # type: ignore[union-attr]

    def test_a_weight_that_is_none(self) -> None:
        for bad in ("b", "b:", "b:x"):
            with pytest.raises(DataError, match="row 1"):
                ids(table(f=["a:1", bad]), Id(weighted=True), separator="|")

    def test_rules(self, tmp_path: Path) -> None:
        rows = table(f=["b", "a", "zz"], n=[0, 9, 5], x=[0.5, 1.0, -3.0])
        words = tmp_path / "words.txt"
        words.write_text("a\nb\n")
        for rule in (Vocabulary(values=("a", "b")), Vocabulary(file=str(words))):
            assert ids(rows, Id(), ids=rule) == [[1], [0], [2]]
        assert ids(rows, Id(), ids=Vocabulary(values=("b",), unknown=7)) == [[0], [7], [7]]
        assert ids(rows, Id(column="n"), ids=Vocabulary(values=("5", "0"))) == [[1], [2], [0]]
        assert ids(rows, Id(column="n"), ids=Range(size=6, unknown=5)) == [[0], [5], [5]]
        with pytest.raises(DataError, match=r"column 'n'.*row 1.*9.*0\.\.5"):
            ids(rows, Id(column="n"), ids=Range(size=6))
        assert ids(rows, Raw(column="x"), ids=Boundaries(edges=(0.0, 1.0))) == [[1], [2], [0]]
        hashed = ids(rows, Id(), ids=HashBuckets(size=1000))
        assert hashed == ids(table(f=["b", "a", "zz"]), Id(), ids=HashBuckets(size=1000))
        assert all(0 <= one < 1000 for (one,) in hashed)
        assert len({one for (one,) in ids(table(f=range(100)), Id(), ids=HashBuckets(size=9))}) == 9

    def test_crosses(self) -> None:
        rows = table(a=["x", "y"], b=[1, 2], c=[[7, 8], []])
        one = ids_of_text(["x", "y"])
        pair = cross([one, torch.tensor([1, 2])]).tolist()
        assert ids(rows, Combo(columns=("a", "b"))) == [[pair[0]], [pair[1]]]
        expected = cross([one[[0, 0]], torch.tensor([7, 8])]).tolist()
        assert ids(rows, Combo(columns=("a", "c"))) == [expected, []]
        assert ids(rows, Combo(columns=("a", "c")), default=5) == [expected, [5]]
        nulls = table(a=["x", None], b=[1, 2])
        assert ids(nulls, Combo(columns=("a", "b")), default="") == [[pair[0]], []]

    def test_lookup(self) -> None:
        rows = table(m=["a:1|b:2", "c:3", ""], k=["b", "a", "c"])
        assert ids(rows, MapLookup(map="m", key="k"), separator="|") == [[2], [], []]
        assert ids(rows, MapLookup(map="m", key="k"), separator="|", default=0) == [[2], [0], [0]]
        assert dense(
            rows, MapLookup(map="m", key="k", numbers=True), separator="|", default=-1
        ) == [
            2,
            -1,
            -1,
        ]
        maps = pa.array([[("a", 1.5), ("b", 2.0)], None, [("c", 4.0)]], MAP)
        keys = table(m=maps, k=[["a", "b", "z"], ["a"], ["c"]])
        for how, first in (("sum", 3.5), ("mean", 1.75), ("min", 1.5), ("max", 2.0)):
            kind = MapLookup(map="m", key="k", numbers=True, reduce=how)  # type: ignore[arg-type]
            rule = Boundaries(edges=(first,))
            assert ids(keys, kind, default=0.0, ids=rule)[0] == [1]
        with pytest.raises(DataError, match=r"column 'm'.*row 1.*key alone"):
            ids(table(m=["a:1", "a"], k=["a", "a"]), MapLookup(map="m", key="k"), separator="|")

    def test_match(self) -> None:
        rows = table(
            m=["p1^s1:1,s2:2|p2^s1:3", "p1^s2:9", ""], p=["p1", "p2", "p1"], s=["s2", "s2", "s1"]
        )
        assert ids(rows, Match(nested_map="m", pkey="p", skey="s")) == [[2], [], []]
        assert ids(rows, Match(nested_map="m", pkey="p", skey="ALL")) == [[1, 2], [], []]
        both = Match(nested_map="m", pkey="ALL", skey="ALL", numbers=True)
        assert ids(rows, both, default=0.0, ids=Boundaries(edges=(6.0, 9.0))) == [[1], [2], [0]]

    def test_tokens(self) -> None:
        rows = table(f=["The  cat", "", None, "a-b"])
        assert ids(rows, Tokenize(lower=True)) == [text("the", "cat"), [], [], text("a-b")]
        assert ids(rows, Tokenize(pattern="[^a-z]+"))[3] == text("a", "b")

    def test_bool_mask(self) -> None:
        rows = table(
            f=["1,2,3", "4"], m=["true,false,1", "0"], n=[[5, 6], []], k=[[True, False], []]
        )
        assert ids(rows, BoolMask(column="f", mask="m"), separator=",") == [[1, 3], []]
        assert ids(rows, BoolMask(column="n", mask="k")) == [[5], []]
        with pytest.raises(DataError, match=r"row 0.*2 values for 3"):
            ids(rows, BoolMask(column="f", mask="k"), separator=",")


class TestLimits:
    def test_boundaries_of_times(self) -> None:
        time_s = 1_700_000_000
        rows = table(f=[time_s - 1, time_s, time_s + 1])
        assert ids(rows, Id(), ids=Boundaries(edges=(time_s,))) == [[0], [1], [1]]

    def test_a_default_takes_the_place_of_nan(self) -> None:
        rows = table(f=[float("nan"), 2.0, None])
        rule = Boundaries(edges=(1.0, 5.0))
        assert ids(rows, Raw(), default=9.0, ids=rule) == [[2], [1], [2]]
        assert ids(rows, Raw(), default="", ids=rule) == [[], [1], []]

    def test_weights_have_no_sequence(self) -> None:
        with pytest.raises(ConfigError, match="sequence of feature 'f'"):
            FeatureSpec(name="f", kind=Id(weighted=True), sequence=ElementWise(delimiter=";"))

    def test_lines_of_a_vocabulary_end_as_files_do(self, tmp_path: Path) -> None:
        file = tmp_path / "known"
        file.write_bytes("a\x0bb\r\nc\u2028d\r\ne".encode())
        rule = Vocabulary(file=str(file))
        rows = table(f=["a\x0bb", "c\u2028d", "e", "a"])
        assert ids(rows, Id(), ids=rule) == [[0], [1], [2], [3]]

    def test_a_length_above_that_of_lists(self) -> None:
        lists = pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))
        found = ids(table(f=lists), Id(), sequence=ElementWise(length=3))
        assert found == [[1, 2], [3, 4]]

    def test_combinations_are_bounded_before_they_are_made(self) -> None:
        rows = table(**{f"c{k}": [[1], [1] * 2000] for k in range(8)})
        kind = Combo(columns=tuple(rows.column_names))
        with pytest.raises(DataError, match=r"feature 'f' in row 1.*at most 65536"):
            ids(rows, kind)
        with pytest.raises(DataError, match=r"feature 'f' in row 1.*at most 9"):
            ids(rows, kind, max_length=9)
        outer = "|".join(["a^b:1"] * 2)
        many = table(m=[outer], p=[["a"] * 300], s=[["b"] * 300])
        with pytest.raises(DataError, match=r"feature 'f' in row 0.*90000 ids"):
            ids(many, Match(nested_map="m", pkey="p", skey="s"))

    def test_a_cross_of_what_is_missing(self) -> None:
        rows = table(a=["x", None], b=[1, 2])
        kind = Combo(columns=("a", "b"))
        with pytest.raises(DataError, match=r"'a' for feature 'f' in row 1.*null"):
            ids(rows, kind)
        pair = cross([ids_of_text(["x", "none"]), torch.tensor([1, 2])]).tolist()
        with pytest.raises(ConfigError, match="default"):
            ids(table(a=["x", "y"], b=[None, 2]), kind, default="none")
        assert ids(rows, kind, default="none") == [[pair[0]], [pair[1]]]
        assert ids(rows, kind, default="") == [[pair[0]], []]

    def test_what_arrow_refuses_names_the_column(self) -> None:
        rows = table(f=pa.array([b"a", b"\xff"]))
        with pytest.raises(DataError, match="column 'f' for feature 'f'"):
            ids(rows, Id(), ids=Vocabulary(values=("a",)))

    @pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()])
    def test_views_are_text(self, kind: Any) -> None:
        rows = table(f=pa.array(["a|b", "", "c"]).cast(kind))
        assert ids(rows, Id(), separator="|") == [text("a", "b"), [], text("c")]

    def test_bytes_of_one_size_are_text_or_refused(self) -> None:
        rows = table(f=pa.array([b"ab", b"cd"], pa.binary(2)))
        assert ids(rows, Id()) == [text("ab"), text("cd")]
        with pytest.raises(DataError, match="'f'"):
            ids(rows, Id(), separator="|")


class TestNumbers:
    def test_raw(self) -> None:
        rows = table(f=[1.5, None], t=["2", "-1e3"])
        assert dense(rows, Raw(), default=0.0) == [1.5, 0]
        assert dense(rows, Raw(column="t")) == [2, -1000]
        with pytest.raises(DataError, match="'f' for feature 'f' in row 1"):
            dense(rows, Raw())
        lists = table(t=["1|2", "3|4"])
        assert dense(lists, Raw(column="t"), separator="|", width=2) == [[1, 2], [3, 4]]
        with pytest.raises(DataError, match=r"row 0.*2 numbers.*3 \(width\).*change width"):
            dense(lists, Raw(column="t"), separator="|", width=3)
        empty = table(t=["1|2", ""])
        assert dense(empty, Raw(column="t"), separator="|", width=2, default=5) == [[1, 2], [5, 5]]

    def test_overlap(self) -> None:
        rows = table(q=["a|b|b", "a", "", "x|y"], t=["b|c", "a", "a", "y|x"])
        expected = {
            "query_common_ratio": [2 / 3, 1, 0, 1],
            "title_common_ratio": [1 / 2, 1, 0, 1],
            "common": [2, 1, 0, 2],
            "is_contain": [0, 1, 1, 1],
            "is_equal": [0, 1, 0, 0],
        }
        for method, numbers in expected.items():
            kind = Overlap(query="q", title="t", method=method)  # type: ignore[arg-type]
            assert dense(rows, kind, separator="|") == pytest.approx(numbers)

    def test_kv_dot(self) -> None:
        rows = table(q=["a:0.5|b:0.5", "a|b|c", "a:2"], d=["d:0.5|b:0.5", "a|b|d", ""])
        assert dense(rows, KvDot(query="q", document="d"), separator="|") == [0.25, 2, 0]
        maps = pa.array([[("a", 0.5), ("b", 0.5)]], MAP)
        assert dense(table(q=[["a", "b", "c"]], d=maps), KvDot(query="q", document="d")) == [1.0]

    @pytest.mark.parametrize(
        ("formula", "expected"),
        [
            ("a / (b + 1)", [0.5, 4.0]),
            ("1 if a == b or a > 3 else -1", [1, 1]),
            ("0 < a <= 1 and not b > 5", [1, 0]),
            ("max(a, b, 2) ** 2 - min(a, b)", [3, 16]),
            ("sigmoid(a - a) + log1p(b * 0) + pi - pi", [0.5, 0.5]),
            ("avg(a, b) + where(b > 0, 10, 20)", [11, 22]),
        ],
    )
    def test_expressions(self, formula: str, expected: list[float]) -> None:
        rows = table(a=[1.0, 4.0], b=pa.array([1, 0]))
        assert dense(rows, Expression(expression=formula)) == pytest.approx(expected)

    def test_a_missing_number_makes_the_result_missing(self) -> None:
        rows = table(a=[1.0, None, 0.0])
        assert dense(rows, Expression(expression="a + 1"), default=-1) == [2, -1, 1]
        with pytest.raises(DataError, match="row 1"):
            dense(rows, Expression(expression="a + 1"))
        with pytest.raises(DataError, match=r"row 2.*finite"):
            dense(rows, Expression(expression="1 / a"), default=0.0)


class TestSequences:
    def test_elements(self) -> None:
        rows = table(f=["a;b;c", "", "d"], m=["a:1|b:2", "a:3", "d:4"])
        sequence = ElementWise(delimiter=";", length=2)
        assert ids(rows, Id(), sequence=sequence) == [text("a", "b"), [], text("d")]
        looked = ElementWise(delimiter=";", columns=("f",))
        kind = MapLookup(map="m", key="f")
        found = ids(rows, kind, separator="|", sequence=looked, default=0)
        assert found == [[1, 2, 0], [], [4]]
        numbers = table(f=[[0.5, 2.0], [], [9.0]])
        rule = Boundaries(edges=(1.0, 5.0))
        assert ids(numbers, Raw(), sequence=ElementWise(), ids=rule) == [[0, 1], [], [2]]
        price = Expression(expression="f * 2")
        assert ids(numbers, price, sequence=ElementWise(), ids=rule) == [[1, 1], [], [2]]

    def test_an_element_is_one_value(self) -> None:
        with pytest.raises(DataError, match=r"sequence element.*row 1.*2 values"):
            ids(table(f=["a;b", "c;d|e"]), Id(), separator="|", sequence=ElementWise(delimiter=";"))

    def test_groups(self) -> None:
        specs = sequence_group(
            "click",
            [
                FeatureSpec(name="item", kind=Id(column="iid")),
                FeatureSpec(name="cate", kind=Id()),
                FeatureSpec(
                    name="count",
                    kind=MapLookup(map="counts", key="cate"),
                    sequence=ElementWise(columns=("cate",)),
                    separator="|",
                    default=0,
                ),
            ],
            delimiter=";",
            length=50,
        )
        rows = table(click__iid=["1;2", "3"], click__cate=["7;8", "7"], counts=["7:5|8:6", "9:1"])
        assert FeatureSet(specs)(rows).ids.to_lists() == {
            "click__item": [[1, 2], [3]],
            "click__cate": [[7, 8], [7]],
            "click__count": [[5, 6], [0]],
        }
        uneven = rows.set_column(1, "click__cate", pa.array(["7;8", "7;9"]))
        with pytest.raises(DataError, match=r"row 1.*2 elements, and 1 of 'click__item'"):
            FeatureSet(specs)(uneven)


class TestSets:
    def test_features_of_features(self) -> None:
        specs = (
            FeatureSpec(name="id", kind=Combo(columns=("feature:bin", "u"))),
            FeatureSpec(name="bin", kind=Raw(column="age"), ids=Boundaries(edges=(18.0,))),
            FeatureSpec(
                name="twice", kind=Expression(expression="x * 2", variables=("feature:x",))
            ),
            FeatureSpec(name="x", kind=Raw(), stub=True),
        )
        with pytest.raises(DataError, match=r"'feature:bin'"):
            FeatureSet(specs)(table(age=[1.5], u=["a"], x=[2.0]))
        made = FeatureSet(specs)
        assert made.columns == ("u", "age", "x")
        assert (made.names, made.num_dense) == (("id", "bin"), 1)
        found = made(table(age=[20], u=["a"], x=[2.0]), threads=2)
        assert found.ids.to_lists()["bin"] == [[1]]
        assert found.dense is not None and found.dense.tolist() == [[4.0]]

    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: Expression(expression="x +"), ConfigError, r"expression 'x \+'"),
            (lambda: Expression(expression="1 + 2"), ConfigError, "no variables"),
            (lambda: Expression(expression="x.real"), ConfigError, "Attribute"),
            (lambda: Expression(expression="[x]"), ConfigError, "List"),
            (lambda: Expression(expression="x['a']"), ConfigError, "Subscript"),
            (lambda: Expression(expression="'a' * 9"), ConfigError, "Constant"),
            (lambda: Expression(expression="lgo(x)"), UnknownName, "lgo.*log"),
            (lambda: Expression(expression="__import__('os')"), ShoalError, None),
            (lambda: Expression(expression="open(x)"), UnknownName, "function"),
            (lambda: Expression(expression="log(x, x, x, x)"), ConfigError, "arguments"),
            (lambda: Expression(expression="prise", variables=("price",)), UnknownName, "price"),
            (lambda: Expression(expression="(" * 300 + "x" + ")" * 300), ConfigError, None),
            (lambda: Expression(expression="-" * 5000 + "x"), ConfigError, None),
            (lambda: Tokenize(pattern="("), ConfigError, "pattern of tokenize"),
            (lambda: Combo(columns=("a",)), ConfigError, "two or more"),
            (lambda: Vocabulary(values=("a", "b", "a")), ConfigError, "'a' at 1 and at 3"),
            (lambda: Vocabulary(), ConfigError, "neither"),
            (lambda: Vocabulary(file="/nowhere/v.txt"), ConfigError, "/nowhere/v.txt"),
            (lambda: Boundaries(edges=(1.0, 1.0)), ConfigError, "rising"),
            (lambda: HashBuckets(size=0), ConfigError, "size of hash"),
            (
                lambda: FeatureSpec(name="f", kind=Raw(), default="x"),
                ConfigError,
                "default of.*'f'",
            ),
            (lambda: FeatureSpec(name="f", kind=Raw(), sequence=ElementWise()), ConfigError, "ids"),
            (lambda: FeatureSpec(name="f", kind=Id(), width=2), ConfigError, "width"),
            (
                lambda: FeatureSpec(name="f", kind=Id(), sequence=ElementWise(columns=("g",))),
                UnknownName,
                "sequence column",
            ),
            (lambda: FeatureSet((FeatureSpec(name="f", kind=Id()),) * 2), ConfigError, "twice"),
        ],
    )
    def test_what_is_refused_before_anything_is_read(
        self, make: Any, error: type[Exception], message: str | None
    ) -> None:
        with pytest.raises(error, match=message):
            make()

    def test_circles_and_unknown_inputs(self) -> None:
        def spec(name: str, of: str) -> FeatureSpec:
            return FeatureSpec(name=name, kind=Id(column=f"feature:{of}"))

        with pytest.raises(ConfigError, match=r"a of b of a|b of a of b"):
            FeatureSet((spec("a", "b"), spec("b", "a")))
        with pytest.raises(UnknownName, match=r"'a' is computed of.*'usr'.*user"):
            FeatureSet((spec("a", "usr"), FeatureSpec(name="user", kind=Id())))

    def test_missing_columns_are_named(self) -> None:
        with pytest.raises(DataError, match=r"column 'user'.*usr"):
            FeatureSet((FeatureSpec(name="user", kind=Id()),))(table(usr=[1]))

    def test_a_vocabulary_file_with_duplicates(self, tmp_path: Path) -> None:
        words = tmp_path / "words.txt"
        words.write_text("a\nb\na\n")
        with pytest.raises(ConfigError, match=r"words\.txt.*'a' at 1 and at 3"):
            Vocabulary(file=str(words))

    def test_no_rows(self) -> None:
        specs = (
            FeatureSpec(name="i", kind=Id(column="s"), separator="|"),
            FeatureSpec(name="l", kind=MapLookup(map="s", key="s"), separator="|"),
            FeatureSpec(name="m", kind=Match(nested_map="s", pkey="s", skey="s")),
            FeatureSpec(name="c", kind=Combo(columns=("s", "n"))),
            FeatureSpec(name="o", kind=Overlap(query="s", title="s"), separator="|"),
            FeatureSpec(name="k", kind=KvDot(query="s", document="s"), separator="|"),
            FeatureSpec(name="e", kind=Expression(expression="n + 1")),
            FeatureSpec(name="t", kind=Tokenize(column="s")),
            FeatureSpec(name="b", kind=BoolMask(column="s", mask="s"), separator="|"),
            FeatureSpec(name="q", kind=Id(column="s"), sequence=ElementWise(delimiter=";")),
        )
        empty = pa.table({"s": pa.array([], pa.string()), "n": pa.array([], pa.int64())})
        found = FeatureSet(specs)(empty)
        assert found.ids.batch_size == 0
        assert found.dense is not None and found.dense.shape == (0, 3)


def test_training_and_serving_are_one_code() -> None:
    specs = (
        FeatureSpec(name="u", kind=Id(), ids=HashBuckets(size=100)),
        FeatureSpec(name="x2", kind=Expression(expression="x * x")),
        FeatureSpec(name="tags", kind=Id(), separator="|"),
    )
    recipe = Recipe(ids=(), label="y", dense=("x",), computed=FeatureSet(specs))
    rows = table(u=["a", "b"], x=[1.0, 3.0], tags=["p|q", ""], y=[0.0, 1.0])
    trained = encode(rows, recipe, "file").take(torch.arange(2))
    served = model_inputs(rows.drop_columns(["y"]), recipe, "request", threads=2)
    assert torch.equal(trained.ids.values_N, served.ids.values_N)
    assert torch.equal(trained.ids.offsets_FB1, served.ids.offsets_FB1)
    assert trained.dense is not None and served.dense is not None
    assert trained.dense.tolist() == served.dense.tolist() == [[1.0, 1.0], [3.0, 9.0]]
    alone = FeatureSet(specs)(rows)
    assert torch.equal(alone.ids.values_N, served.ids.values_N)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("others", [(), ("n",), ("tags",)])
def test_texts_next_to_others(threads: int, others: tuple[str, ...]) -> None:
    kinds = {
        "a": FeatureSpec(name="a", kind=Id(), default="-"),
        "n": FeatureSpec(name="n", kind=Id()),
        "tags": FeatureSpec(name="tags", kind=Id(), separator="|"),
        "b": FeatureSpec(name="b", kind=Id()),
    }
    expected = {
        "a": [text("x"), text("-"), text("z")],
        "n": [[1], [2], [3]],
        "tags": [text("p", "q"), [], text("p")],
        "b": [[7], text("b"), text("c")],
    }
    rows = table(a=["x", None, "z"], n=[1, 2, 3], tags=["p|q", "", "p"], b=["7", "b", "c"])
    for names in (("a", *others, "b"), (*others, "b", "a"), ("b", "a", *others)):
        found = FeatureSet(tuple(kinds[name] for name in names))(rows, threads=threads).ids
        assert found.to_lists() == {name: expected[name] for name in names}


def test_numbers_of_every_width_are_joined() -> None:
    specs = (
        FeatureSpec(name="row", kind=Id()),
        FeatureSpec(name="x", kind=Raw(), default=-1.0),
        FeatureSpec(name="pair", kind=Raw(), width=2),
        FeatureSpec(name="y", kind=Raw()),
    )
    rows = table(
        row=[1, 2, 3], x=[0.5, None, float("nan")], pair=[[1, 2], [3, 4], [5, 6]], y=[7] * 3
    )
    found = FeatureSet(specs)(rows).dense
    assert found is not None
    assert found.tolist() == [[0.5, 1, 2, 7], [-1, 3, 4, 7], [-1, 5, 6, 7]]
