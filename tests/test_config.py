"""Settings: values, where they come from, and the sentence for each thing that can be wrong with them."""

from __future__ import annotations

import copy
import typing
from pathlib import Path

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ray.config import Config, choices, settings
from hicache_ray.config_sizes import format_size, parse_size, parse_size_or_0
from hicache_ray.config_sources import (
    HIDDEN,
    FileText,
    changed,
    env_name,
    flag_name,
    load,
    masked,
    read_sources,
    reference,
    render,
)
from hicache_ray.errors import ConfigError
from hicache_ray.layout import ORDERS


def refusal(**sources: typing.Any) -> list[str]:
    """The sentences with which these sources are refused."""
    with pytest.raises(ConfigError) as caught:
        load(**sources)
    return str(caught.value).splitlines()


def file(text: str) -> FileText:
    return FileText("tier.yaml", text)


def test_the_defaults_are_legal_and_those_of_the_design() -> None:
    config = load().config
    assert config == Config()
    cache = config.cache
    assert (cache.page_size, cache.grid, cache.track_interval, cache.selective_threshold, cache.prefetch_threshold) == (
        64,
        256,
        256,
        2,
        256,
    )
    assert (cache.lookup_deadline_s, cache.host_ratio, cache.host_size) == (2.0, 2.0, None)
    assert (cache.write_policy, cache.layout, cache.device_layout) == ("write_through", "page_first_direct", "layer_first")
    assert (config.serve.host, config.admin.host) == ("127.0.0.1", "127.0.0.1")


def test_every_setting_has_a_default_and_a_description() -> None:
    assert [name for name, field in settings().items() if field.is_required() or not field.description] == []


def test_layouts_are_those_of_the_layout_module() -> None:
    assert choices("cache.layout") == choices("cache.device_layout") == tuple(ORDERS)


def test_later_sources_win_and_each_value_knows_its_origin() -> None:
    loaded = load(
        file("cache:\n  page_size: 32\n  layout: page_head\n  grid: 128\nmodel:\n"),
        {"HICACHE__CACHE__LAYOUT": "page_first", "HICACHE__CACHE__GRID": "64", "HICACHE__CACHE__EXACT": "false", "PATH": "/bin"},
        {"cache.grid": 512, "model.tp": 2, "model.family": "qwen3", "storage.size": "1GiB", "cache.host_size": None},
    )
    config = loaded.config
    assert (config.cache.page_size, config.cache.layout, config.cache.grid, config.cache.exact) == (32, "page_first", 512, False)
    assert (config.model.tp, config.model.family, config.storage.size, config.cache.host_size) == (2, "qwen3", 2**30, None)
    assert {name: origin for name, origin in loaded.origins.items() if origin != "default"} == {
        "model.family": "flag --model",
        "model.tp": "flag --tp",
        "cache.page_size": "file tier.yaml",
        "cache.grid": "flag --grid",
        "cache.exact": "env HICACHE__CACHE__EXACT",
        "cache.layout": "env HICACHE__CACHE__LAYOUT",
        "storage.size": "flag --storage-size",
    }
    assert list(loaded.origins) == list(settings())


@pytest.mark.parametrize("text", ["", "{}", "cache:\n", "# nothing\n"])
def test_an_empty_file_sets_nothing(text: str) -> None:
    assert load(file(text)) == load()


@pytest.mark.parametrize("empty", ["", "null"])
def test_the_environment_can_unset_what_may_be_null(empty: str) -> None:
    loaded = load(file("cache: {host_size: 1MiB}"), {"HICACHE__CACHE__HOST_SIZE": empty})
    assert loaded.config.cache.host_size is None
    assert loaded.origins["cache.host_size"] == "env HICACHE__CACHE__HOST_SIZE"


def test_text_from_the_environment_stays_text() -> None:
    assert load(env={"HICACHE__NAMESPACE__REVISION": "0123"}).config.namespace.revision == "0123"


def test_names_of_flags_and_variables_are_unique() -> None:
    assert len({flag_name(n) for n in settings()}) == len({env_name(n) for n in settings()}) == len(settings())
    assert [flag_name(n) for n in ("model.family", "cache.write_policy", "storage.backend", "admin.port")] == [
        "--model",
        "--write-policy",
        "--storage-backend",
        "--admin-port",
    ]
    assert load(env={env_name("cache.page_size"): "128"}).config.cache.page_size == 128


#: flags, the sentence
REFUSED: list[tuple[dict[str, object], str]] = [
    (
        {"cache.layout": "diagonal"},
        'cache.layout is "diagonal"; choose one of layer_first, page_first, page_first_direct, page_head (set by flag --layout)',
    ),
    (
        {"cache.write_policy": "eager"},
        'cache.write_policy is "eager"; choose one of write_through, write_through_selective, write_back (set by flag --write-policy)',
    ),
    ({"cache.io_backend": "magic"}, 'cache.io_backend is "magic"; choose one of auto, direct, kernel (set by flag --io-backend)'),
    ({"storage.backend": "s3"}, 'storage.backend is "s3"; choose one of arena, none (set by flag --storage-backend)'),
    ({"model.dtype": "int3"}, 'model.dtype is "int3"; choose one of float32, bfloat16 (set by flag --dtype)'),
    ({"cache.page_size": 0}, "cache.page_size is 0; it must be at least 1 (set by flag --page-size)"),
    ({"cache.page_size": "many"}, 'cache.page_size is "many"; it must be a whole number (set by flag --page-size)'),
    ({"cache.page_size": 1.5}, "cache.page_size is 1.5; it must be a whole number (set by flag --page-size)"),
    (
        {"cache.page_size": True},
        "cache.page_size is true; true and false are not numbers or text; write the value itself (set by flag --page-size)",
    ),
    ({"cache.exact": "maybe"}, 'cache.exact is "maybe"; choose true or false (set by flag --exact)'),
    ({"cache.grid": 200}, "cache.grid is 200; it must be a multiple of cache.page_size (64), such as 192 or 256"),
    ({"cache.grid": 32}, "cache.grid is 32; it must be a multiple of cache.page_size (64), such as 64"),
    ({"cache.grid": 0}, "cache.grid is 0, and cache.exact needs a grid; choose a multiple of cache.page_size, or set cache.exact to false"),
    ({"cache.track_interval": 100}, "cache.track_interval is 100; it must be a multiple of cache.page_size (64), such as 64 or 128"),
    ({"cache.device_tokens": 128}, "cache.device_tokens is 128; it must be at least 256, one chunk of the grid or one page"),
    ({"cache.host_ratio": float("nan")}, "cache.host_ratio is NaN; it must be a number (set by flag --host-ratio)"),
    ({"cache.host_ratio": 0}, "cache.host_ratio is 0; it must be more than 0 (set by flag --host-ratio)"),
    (
        {"cache.host_size": "2G"},
        'cache.host_size is "2G"; write bytes, or a number with a unit, such as 512MB (10^6) or 2GiB (2^30) (set by flag --host-size)',
    ),
    ({"storage.size": 0}, "storage.size is 0; it must be more than 0 bytes (set by flag --storage-size)"),
    ({"model.tp": 0}, "model.tp is 0; it must be at least 1 (set by flag --tp)"),
    ({"serve.port": 70000}, "serve.port is 70000; it must be at most 65535 (set by flag --serve-port)"),
    ({"serve.port": 8401}, "admin.port is 8401, and so is serve.port; choose different ports"),
    (
        {"storage.name": "../x"},
        'storage.name is "../x"; use at most 48 letters, digits, - and _, the first one a letter or digit (set by flag --storage-name)',
    ),
    (
        {"cache.prefetch_timeout_cap_s": 1},
        "cache.prefetch_timeout_cap_s is 1.0; it must be at least cache.prefetch_timeout_base_s (2.0)",
    ),
    (
        {"engine.forward_deadline_s": 5},
        "engine.forward_deadline_s is 5.0; it must be more than engine.gloo_timeout_s (10.0), "
        "or a frozen rank ends the call before its peers notice",
    ),
]


@pytest.mark.parametrize(("flags", "sentence"), REFUSED, ids=lambda v: str(v)[:50])
def test_a_wrong_value_is_refused_with_a_sentence(flags: dict[str, object], sentence: str) -> None:
    assert refusal(flags=flags) == [sentence]


def test_everything_that_is_wrong_is_said_at_once() -> None:
    said = refusal(file=file("cache: {page_size: -1, layout: x}\nmodel: {tp: two}"))
    assert [line.partition(";")[0] for line in said] == ['model.tp is "two"', "cache.page_size is -1", 'cache.layout is "x"']
    assert all(line.endswith("(set by file tier.yaml)") for line in said)


def test_an_unknown_setting_is_refused_with_the_nearest_one() -> None:
    (said,) = refusal(env={"HICACHE__CACHE__PAGESIZE": "64"})
    assert said.startswith(
        "there is no setting cache.pagesize (set by env HICACHE__CACHE__PAGESIZE); did you mean cache.page_size? "
        "the settings of cache are page_size, grid,"
    )
    (said,) = refusal(file=file("tier: {x: 1}"))
    assert said == (
        "there is no setting tier.x (set by file tier.yaml); "
        "the sections are model, cache, storage, engine, serve, admin, namespace, tenants"
    )  # fmt: skip
    (said,) = refusal(flags={"layout": "page_first"})
    assert "there is no setting layout (set by flag layout)" in said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("cache: [", "tier.yaml is not valid YAML, line 1: expected the node content, but found '<stream end>'"),
        ("a\x00b", "tier.yaml is not valid YAML: it holds characters that are not text"),
        ("- 1", "tier.yaml must hold sections with settings, such as 'cache:' with 'page_size: 64' indented below it"),
        ("cache: 7", "cache in tier.yaml must hold settings, one 'name: value' on each line, indented below it"),
        ("cache: {page_size: [1]}", "cache.page_size is [1]; it must be a whole number (set by file tier.yaml)"),
        ("namespace: {revision: 0123}", "namespace.revision is 83; it must be text; in a file, put it in quotes (set by file tier.yaml)"),
        (
            "storage: {size: null}",
            "storage.size is null; write bytes, or a number with a unit, such as 512MB (10^6) or 2GiB (2^30) (set by file tier.yaml)",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_a_sentence(text: str, sentence: str) -> None:
    assert refusal(file=file(text)) == [sentence]


def test_yaml_cannot_make_objects(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (said,) = refusal(file=file(f"cache: !!python/object/apply:os.mkdir ['{marker}']"))
    assert said.startswith("tier.yaml is not valid YAML, line 1: could not determine a constructor")
    assert not marker.exists()


SECRET = "correct-horse-battery"


def test_secrets_are_used_but_never_shown() -> None:
    loaded = load(file(f"admin: {{token: {SECRET}}}"), {"HICACHE__NAMESPACE__SALT": SECRET})
    config = loaded.config
    assert config.admin.token is not None
    assert config.admin.token.get_secret_value() == config.namespace.salt.get_secret_value() == SECRET
    rows = {row.name: row for row in render(loaded)}
    assert (rows["admin.token"].value, rows["admin.token"].origin) == (HIDDEN, "file tier.yaml")
    assert masked(config)["namespace"]["salt"] == HIDDEN
    for shown in (render(loaded), masked(config), loaded, config, config.model_dump_json()):
        assert SECRET not in str(shown) + repr(shown)


@pytest.mark.parametrize("text", [f"admin: {{token: [{SECRET}]}}", f"namespace: {{salt: {{x: {SECRET}}}}}", f"admin: {{token: '{SECRET}"])
def test_a_refused_secret_is_not_shown_either(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(file(text))
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert not isinstance(caught.value.__context__, pydantic.ValidationError)


@pytest.mark.parametrize("token", ["''", "short"])
def test_a_token_that_protects_nothing_is_refused(token: str) -> None:
    assert refusal(file=file(f"admin: {{token: {token}}}")) == [
        "admin.token is not as it should be (its value is not shown); it must have at least 8 characters (set by file tier.yaml)"
    ]


def test_print_config_shows_every_setting_as_it_would_be_written() -> None:
    rows = {row.name: row.value for row in render(load(flags={"cache.host_size": "1536MiB", "cache.exact": "off"}))}
    assert list(rows) == list(settings())
    wanted = {"cache.host_size": "1536MiB", "cache.exact": "false", "storage.size": "512MiB", "storage.directory": "null"}
    assert {name: rows[name] for name in wanted} == wanted
    assert (rows["namespace.salt"], rows["admin.token"], rows["cache.lookup_deadline_s"]) == ('""', "null", "2.0")


def test_what_is_printed_can_be_read_back() -> None:
    loaded = load(flags={"storage.size": 12345, "model.tp": 2, "cache.layout": "page_head"})
    printed = {row.name: "" if row.value == '""' else row.value for row in render(loaded)}
    assert load(env={env_name(name): value for name, value in printed.items()}).config == loaded.config


def test_a_changed_copy_is_checked_like_the_original() -> None:
    config = load(flags={"admin.token": SECRET, "cache.page_size": 128}).config
    before = copy.deepcopy(config)
    other = changed(config, {"cache.write_policy": "write_back"})
    assert (other.cache.write_policy, other.cache.page_size, other.admin) == ("write_back", 128, config.admin)
    assert config == before
    with pytest.raises(ConfigError, match=r"cache.grid is 64; it must be a multiple of cache.page_size \(128\)"):
        changed(config, {"cache.grid": 64})
    with pytest.raises(ConfigError, match=r"there is no setting cache\.nothing"):
        changed(config, {"cache.nothing": 1})


TENANTS = "tenants: {acme: {salt: the salt of acme, key: key-of-acme, max_bytes: 1GiB}, zenith: {salt: the salt of zenith}}"


def test_tenants_come_from_a_file_and_the_environment() -> None:
    env = {"HICACHE__TENANTS__ACME__MAX_BYTES": "2GiB", "HICACHE__TENANTS__NEW_ONE__SALT": "of a third one"}
    loaded = load(file(TENANTS), env)
    found = loaded.config.tenants
    assert list(found) == ["acme", "zenith", "new_one"]
    assert (found["acme"].max_bytes, found["zenith"].max_bytes, found["zenith"].key) == (2**31, None, None)
    assert found["new_one"].salt.get_secret_value() == "of a third one"
    rows = {row.name: (row.value, row.origin) for row in render(loaded) if row.name.startswith("tenants.")}
    assert rows == {
        "tenants.acme.salt": (HIDDEN, "file tier.yaml"),
        "tenants.acme.key": (HIDDEN, "file tier.yaml"),
        "tenants.acme.max_bytes": ("2GiB", "env HICACHE__TENANTS__ACME__MAX_BYTES"),
        "tenants.zenith.salt": (HIDDEN, "file tier.yaml"),
        "tenants.zenith.key": ("null", "default"),
        "tenants.zenith.max_bytes": ("null", "default"),
        "tenants.new_one.salt": (HIDDEN, "env HICACHE__TENANTS__NEW_ONE__SALT"),
        "tenants.new_one.key": ("null", "default"),
        "tenants.new_one.max_bytes": ("null", "default"),
    }
    assert masked(loaded.config)["tenants"]["zenith"] == {"salt": HIDDEN, "key": None, "max_bytes": None}
    assert "salt of" not in f"{loaded!r} {render(loaded)} {masked(loaded.config)}"
    other = changed(loaded.config, {"tenants.zenith.max_bytes": 5, "model.tp": 2})
    assert other.tenants["zenith"].max_bytes == 5
    assert other.tenants["acme"] == found["acme"]
    assert load().config.tenants == {}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a b: {salt: 12345678}", 'tenants has a tenant of the name "a b"; use at most 48 letters, digits, - and _'),
        ("a: {key: 12345678}", "tenants.a.salt is missing; every tenant needs one"),
        ("a: 5", "tenants.a in tier.yaml must hold settings, such as 'salt: ...' indented below it"),
        ("a: {}", "tenants.a in tier.yaml must hold settings, such as 'salt: ...' indented below it"),
        ("a: {salt: short}", "tenants.a.salt is not as it should be (its value is not shown); it must have at least 8"),
        ("a: {salt: long enough, max_bytes: 2G}", 'tenants.a.max_bytes is "2G"; write bytes, or a number with a unit'),
        ("a: {salt: long enough, secret: x}", "there is no setting tenants.a.secret (set by file tier.yaml); a tenant has a name and"),
        (
            "a: {salt: long enough, key: the same key}, b: {salt: long enough, key: the same key}",
            "tenants.a.key and tenants.b.key are equal; give every tenant a key of its own",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_tenant_that_is_not_apart_is_refused(text: str, sentence: str) -> None:
    assert refusal(file=file(f"tenants: {{{text}}}"))[0].startswith(sentence)


def test_a_variable_that_names_no_setting_of_a_tenant_is_refused() -> None:
    (said,) = refusal(env={"HICACHE__TENANTS__ACME": "x"})
    assert said.startswith("there is no setting tenants.acme (set by env HICACHE__TENANTS__ACME); a tenant has a name and the settings")


def test_the_tree_is_frozen() -> None:
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        Config().cache.page_size = 1  # type: ignore[misc]


def test_the_file_and_the_environment_are_read_in_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tier.yaml"
    path.write_text("model: {tp: 2}\n", encoding="utf-8")
    monkeypatch.setenv("HICACHE__CACHE__LAYOUT", "page_head")
    assert read_sources(str(path)) == (FileText(str(path), "model: {tp: 2}\n"), {"HICACHE__CACHE__LAYOUT": "page_head"})
    assert read_sources(None) == (None, {"HICACHE__CACHE__LAYOUT": "page_head"})
    with pytest.raises(ConfigError, match=r"missing\.yaml cannot be read: .*; name a YAML file in UTF-8"):
        read_sources(str(tmp_path / "missing.yaml"))
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_sources(str(path))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096), (4096, 4096), ("10 B", 10), ("512 MB", 512_000_000), ("2GiB", 2**31), ("2gib", 2**31), ("2Gi", 2**31),
        ("1.5KiB", 1536), ("0.1KB", 100), ("1TiB", 2**40), (" 64 KiB ", 65536),
    ],
)  # fmt: skip
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "2G", "-1KiB", "1e9", "GiB", "1 2", "0", 0, -5, None, True, 1.5, "0.0MiB", "٣KiB", [1]])
def test_sizes_that_are_none(text: object) -> None:
    with pytest.raises(ValueError, match=r"write bytes|more than 0"):
        parse_size(text)


def test_a_rate_may_be_0() -> None:
    assert [parse_size_or_0(value) for value in ("0", 0, "1KiB")] == [0, 0, 1024]
    assert parse_size_or_0(format_size(0)) == 0
    with pytest.raises(ValueError, match="write bytes"):
        parse_size_or_0(False)
    assert Config(storage={"repair_rate": "0"}).storage.repair_rate == 0
    assert Config().storage.repair_rate == 64 << 20


@given(st.one_of(st.integers(1, 2**60), st.integers(1, 2**20).map(lambda n: n * 1024), st.integers(1, 2**20).map(lambda n: n * 10**6)))
def test_a_size_is_written_so_that_it_reads_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_the_readme_lists_the_settings(repository: Path) -> None:
    readme = (repository / "README.md").read_text(encoding="utf-8")
    wanted = reference()
    assert wanted in readme, f"the table of settings in README.md is out of date; it should read\n\n{wanted}"
