"""The pool's security group, which admits only its own members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from etrain_jupyter.plugins.ec2.account.site import POOL_TAG, Site, Step, View, tags_from
from etrain_jupyter.plugins.ec2.ec2_api import tag_list
from etrain_jupyter.plugins.ec2.network import admit_members, admits_members


class GroupPiece:
    """The security group.

    Args:
        site: The pool's place in the account.
        vpc: The VPC of the pool's subnets.
    """

    def __init__(self, site: Site, vpc: str) -> None:
        self._site = site
        self._vpc = vpc

    def to_make(self) -> View:
        """Return the steps that create the group and its rule."""
        found = self._find()
        steps = []
        if not found:
            steps.append(
                Step(text=f"create security group {self._site.group_name}", run=self._create)
            )
        else:
            self._name_in_spec(found[0]["GroupId"])
        if not found or not admits_members(found[0]):
            steps.append(
                Step(
                    text=f"admit the members of security group {self._site.group_name} to each "
                    "other",
                    run=lambda: admit_members(
                        self._site.clients.ec2, self._site.spec.network.security_group
                    ),
                )
            )
        return View(steps=steps)

    def to_remove(self) -> View:
        """Return the step that deletes the group."""
        steps, notes = [], list[str]()
        for one in self._find():
            what = f"security group {one['GroupName']} ({one['GroupId']})"
            if self._site.is_removable(tags_from(one.get("Tags", ())), what, notes):
                steps.append(
                    Step(
                        text=f"delete {what}",
                        run=partial(
                            self._site.clients.ec2.delete_security_group, GroupId=one["GroupId"]
                        ),
                    )
                )
        return View(steps=steps, notes=notes)

    def ids(self) -> list[str]:
        """Return the ids of the groups that were created for this pool."""
        return [one["GroupId"] for one in self._find()]

    def _find(self) -> Sequence[Mapping[str, Any]]:
        filters = [{"Name": f"tag:{POOL_TAG}", "Values": [self._site.mark]}]
        if self._vpc:
            filters.append({"Name": "vpc-id", "Values": [self._vpc]})
        pages = self._site.clients.ec2.get_paginator("describe_security_groups")
        return [one for page in pages.paginate(Filters=filters) for one in page["SecurityGroups"]]

    def _create(self) -> None:
        made = self._site.clients.ec2.create_security_group(
            GroupName=self._site.group_name,
            Description=f"etrain-jupyter pool {self._site.name}: its own members only",
            VpcId=self._vpc,
            TagSpecifications=[
                {"ResourceType": "security-group", "Tags": tag_list(self._site.tags())}
            ],
        )
        self._name_in_spec(made["GroupId"])

    def _name_in_spec(self, group: str) -> None:
        # The launcher's policy and the entry in pools.yaml name the group.
        network = self._site.spec.network.model_copy(update={"security_group": group})
        self._site.spec = self._site.spec.model_copy(update={"network": network})
