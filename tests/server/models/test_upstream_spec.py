"""Specs of models of other servers."""

import pytest

from policies.types import SpecError
from server.models.upstream_spec import upstreams_of


def test_each_url_is_a_device_and_a_spec_of_its_own() -> None:
    found = upstreams_of("oip:http://a:8000/m,https://b/some%20model,http://[::1]:9/m/")
    assert [each.device for each in found] == ["oip:a:8000", "oip:b:443", "oip:[::1]:9"]
    assert [each.model for each in found] == ["m", "some model", "m"]
    assert found[1].spec == "oip:https://b:443/some%20model"
    assert [upstreams_of(each.spec) for each in found] == [[each] for each in found]
    assert upstreams_of("model.onnx") == upstreams_of("googlenet") == []


@pytest.mark.parametrize(
    "spec",
    [
        "oip:",
        "oip:a:8000/m",
        "oip:ftp://a/m",
        "oip:http://a:8000",
        "oip:http://a:8000/",
        "oip:http:///m",
        "oip:http://a:99999/m",
        "oip:http://a:0/m",
        "oip:http://a:8000/v2/models/m",
        "oip:http://user:secret@a:8000/m",
        "oip:http://a:8000/m?x=1",
        "oip:http://[::1/m",
        "oip:http://a:8000/m,",
    ],
)
def test_a_malformed_url_is_an_error_that_shows_the_form(spec: str) -> None:
    with pytest.raises(SpecError, match="is not the URL of a model; give NAME=oip:http://HOST:PORT/MODEL") as caught:
        upstreams_of(spec)
    assert "\n" not in str(caught.value)
