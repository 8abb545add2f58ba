"""Real evidence from DARKNIGHT_SHARED/attestation, by the names in its README."""

from pathlib import Path

import pytest

from darknight.trust.evidence import Evidence

SGX_NOW, TDX_NOW, OUTDATED_NOW, SNP_NOW = 1751624924, 1751624191, 1772707803, 1751624924
SGX_STATUS = "ConfigurationAndSWHardeningNeeded"

MILAN = "amd_ask_ark_milan.pem"
FILES = {
    "sgx": ("sgx_quote", "sgx_quote_collateral.json", ()),
    "tdx": ("tdx_quote", "tdx_quote_collateral.json", ()),
    "tdx outdated": ("tdx_quote_outdated", "tdx_quote_outdated_collateral.json", ()),
    "snp": ("trustee_snp_test-report.bin", None, ("trustee_snp_test-vcek.der", MILAN)),
    "snp tampered": ("trustee_snp_test-report.bin", None, ("trustee_snp_test-vcek-invalid-new.der", MILAN)),
    "snp debug": ("snp_attestation.bin", None, ("snp_vcek.testcer", "snp_milan.testcer")),
}


def folder_in(shared: Path) -> Path:
    if not (shared / "attestation").is_dir():
        pytest.skip("DARKNIGHT_SHARED has no folder attestation")
    return shared / "attestation"


def evidence_of(folder: Path, name: str) -> Evidence:
    quote, collateral, certificates = FILES[name]
    return Evidence.of(
        (folder / quote).read_bytes(),
        collateral=None if collateral is None else (folder / collateral).read_bytes(),
        certificates=tuple((folder / each).read_bytes() for each in certificates),
    )
